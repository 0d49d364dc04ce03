"""The update itself, as pure functions, the checks of what users hand over, and the lines of a summary."""
