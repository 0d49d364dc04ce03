"""The names inside a run folder.

run.toml          the resolved configuration
lock              held by the process that writes here
events.jsonl      what happened, append-only
checkpoints/      step-NNNNNN/
report.html       written at the end
loggers.json      the id that loggers know the run by; they write to tensorboard/ and wandb/
cache/            what was compiled and tuned, under `training.deterministic`

An export, which may be in it or elsewhere, is a folder with an export.json.
"""

CONFIG, EVENTS, CHECKPOINTS, REPORT = "run.toml", "events.jsonl", "checkpoints", "report.html"
LOCK, LOGGERS, CACHE = "lock", "loggers.json", "cache"
EXPORT_RECORD = "export.json"
