"""A Flower app that uses fedsieve."""
