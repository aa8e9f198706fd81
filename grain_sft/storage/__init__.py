"""Local and remote files: reads, retries, the shard cache, artifacts written whole, locks."""
