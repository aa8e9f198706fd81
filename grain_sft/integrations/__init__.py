"""Where pipelines meet trainers: MaxText, arrays over many hosts, checkpoints. Each module imports what it needs."""
