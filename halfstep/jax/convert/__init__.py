"""From a policy to parameters and to the functions that a loss calls."""
