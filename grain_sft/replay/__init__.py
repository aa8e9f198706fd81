"""What only exact replay of another system needs, and the core does not call: learning rates."""
