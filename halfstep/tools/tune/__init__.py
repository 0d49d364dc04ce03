"""Which module bears which format: `halfstep tune`."""
