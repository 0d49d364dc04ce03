"""The names of the files and folders inside a run folder."""

CONFIG = "run.toml"  # the resolved configuration
EVENTS = "events.jsonl"  # what happened, append-only
CHECKPOINTS = "checkpoints"  # step-NNNNNN/
REPORT = "report.html"  # the page, written at the end
