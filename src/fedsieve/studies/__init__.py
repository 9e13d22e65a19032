"""Studies: the tables and figures of the paper, and studies of the package itself."""
