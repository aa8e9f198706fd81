"""Measurements of speed; run by `grain-sft bench`, never by tests with a clock."""
