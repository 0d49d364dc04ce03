"""`halfstep audit`: what is wrong with a script, a run, a checkpoint, a recipe or a model, and what to do."""
