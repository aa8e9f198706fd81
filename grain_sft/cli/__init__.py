"""Command line `grain-sft`. A function of a command's name declares its arguments. Another function runs the command."""
