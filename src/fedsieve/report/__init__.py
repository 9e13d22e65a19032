"""Reports: one self-contained HTML page from what runs left on disk. No torch here."""
