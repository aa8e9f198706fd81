"""`grain-sft demo`: train on this machine's own text, kill the process, resume from a step number, and compare.

In the order in which it happens: `folder` (where files are), `text` (what is read), `data` and `prepare` (a corpus
of it), `model`, `checkpoint` and `train` (one run, in a process of its own), `child` and `progress` (that process as
its parent sees it), `log` and `compare` (what a run did, and whether two did the same), `run` (all of it).
"""
