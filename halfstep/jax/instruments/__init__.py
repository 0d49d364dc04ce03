"""What looks at a run: audit, monitor, coverage, and the search for what was not finite."""
