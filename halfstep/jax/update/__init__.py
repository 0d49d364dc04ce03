"""The update itself, as pure functions, and the checks of what users hand over."""
