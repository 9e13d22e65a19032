"""Tables, figures, the page: read the store only. No torch here."""
