"""From a policy to modules, parameters and the functions that a model calls."""
