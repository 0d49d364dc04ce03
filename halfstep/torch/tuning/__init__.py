"""What `halfstep tune` asks of a model: which rounding its gradients notice, what a format saves, short runs."""
