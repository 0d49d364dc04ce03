"""A folder for PYTHONPATH: Python runs its `sitecustomize` in every process of a watched script."""
