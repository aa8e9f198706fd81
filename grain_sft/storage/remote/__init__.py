"""Remote files: clients, retries, checked requests, options, and shards in a bucket."""
