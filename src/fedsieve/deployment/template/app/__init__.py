"""A Flower app over fedsieve."""
