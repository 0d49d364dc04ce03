"""What surrounds a step: the checks of what users hand over."""
