"""What a run reads: from a source to the tokens of each update."""
