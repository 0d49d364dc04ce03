"""The arms of the race: the usual recipes and ours on one model, each in a process of its own."""
