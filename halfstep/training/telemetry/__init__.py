"""What a run records and shows: events, time and utilization, progress, loggers."""
