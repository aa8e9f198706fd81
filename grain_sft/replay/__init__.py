"""Helpers for the exact replay of other systems. `learning_rate` computes the learning rate that OpenChat chooses."""
