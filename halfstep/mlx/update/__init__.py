"""What makes an update, and the checks of what users hand over."""
