"""What a run is: the schema, TOML files and overrides, and the recipes that come with halfstep."""
