"""Readers that turn input files (JSONL, Parquet, text, …) into records, and records into conversations."""
