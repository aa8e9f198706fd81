"""Files in buckets: clients for each kind of storage, requests with retries, and checks of the responses."""
