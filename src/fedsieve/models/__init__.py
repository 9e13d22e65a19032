"""A trained model as a file."""
