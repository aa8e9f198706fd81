"""How many files a scan reads at the same time."""

THREADS = 32  # a scan waits for the disk or for a bucket, not for the processor
