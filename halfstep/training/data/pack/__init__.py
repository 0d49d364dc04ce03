"""`halfstep data pack`: text, JSONL, parquet or a dataset to token shards with an index."""
