"""What an audit sees of a training in torch."""
