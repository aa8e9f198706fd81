"""Remote files: clients, requests with retries, and checks of their responses."""
