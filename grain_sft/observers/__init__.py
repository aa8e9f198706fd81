"""Observers of a run: metrics, and the watchdog that names what a run waits for."""
