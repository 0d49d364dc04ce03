"""The command line: turns arguments into a call of a tool, and its result into text. Nothing imports it."""
