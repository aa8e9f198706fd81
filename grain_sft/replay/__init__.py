"""Helpers for the exact replay of other systems. The module `learning_rate` computes OpenChat's automatic learning rate."""
