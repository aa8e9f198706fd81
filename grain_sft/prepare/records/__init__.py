"""Reading of input files (JSONL, Parquet, text, …) into records, and of records into conversations."""
