"""One training step without a device: what it would allocate, multiply and move, for `halfstep plan`."""
