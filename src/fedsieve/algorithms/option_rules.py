"""Rules that options of algorithms share. Each raises a ValueError that names the option, the rule and the value."""


def require_at_least(least: float, **options: float) -> None:
    """Raise ValueError if an option is below `least`."""
    for name, value in options.items():
        if not value >= least:
            raise ValueError(f"{option_name(name)} must be at least {least}; got {value}")


def require_positive(**options: float) -> None:
    """Raise ValueError if an option is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{option_name(name)} must be above 0; got {value}")


def require_fraction(**options: float) -> None:
    """Raise ValueError if an option is outside [0, 1]."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{option_name(name)} is a fraction and must be between 0 and 1; got {value}")


def option_name(field: str) -> str:
    """Return the name of an option on the command line."""
    return "algorithm." + field.replace("_", "-")
