"""Command line `grain-sft`. Each command has a function that declares its arguments, and a function that runs it."""
