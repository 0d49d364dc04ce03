"""The command line: turns arguments into a call of a tool, and its result into text. Nothing imports it."""

begun: float | None = None  # when the command that runs was started, by `time.perf_counter`
