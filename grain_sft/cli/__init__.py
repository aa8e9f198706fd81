"""Command line `grain-sft`: one function for each command declares its arguments and the function that runs it."""
