"""What stands around a step: checks, summary, results read back, the search for what was not finite."""
