"""What can go wrong in mixed precision, as rules that read a record of what was seen."""
