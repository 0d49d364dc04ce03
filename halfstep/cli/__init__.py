"""The command line: arguments to a tool, its result to text. Nothing imports it."""
