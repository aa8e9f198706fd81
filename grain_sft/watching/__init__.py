"""Watching a run: what makes batches, since when, and where it is while a step is waited for too long."""
