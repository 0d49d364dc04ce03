"""Which module tolerates which format: `halfstep tune`."""
