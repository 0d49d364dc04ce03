"""Two ways to train, compared: `halfstep compare`."""
