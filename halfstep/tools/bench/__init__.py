"""The race: recipes that train one model in turn, in one run."""
