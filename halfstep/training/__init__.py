"""When things happen: data, schedule, the loop, checkpoints, events and progress; no framework is imported.

Read in this order: paths, files, schedule; data, checkpoints, telemetry; memory, session; evaluation, sampling;
run; weights; loop.
"""
