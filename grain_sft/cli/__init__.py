"""Command line `grain-sft`. A function named after a command declares the command's arguments. Another runs the command."""
