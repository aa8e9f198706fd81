"""Command line `grain-sft`. A function named after a command declares its arguments. `run_` and that name runs it."""
