"""The pure core: torch and numpy only, no files, no clock, no global random state."""
