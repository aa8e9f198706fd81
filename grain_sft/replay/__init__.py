"""Parts of the replay of other systems that the core does not call: learning rates."""
