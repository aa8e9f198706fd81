"""Records: files of any kind read into records, and records of any schema into conversations."""
