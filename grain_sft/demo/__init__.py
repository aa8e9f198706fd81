"""`grain-sft demo`: train on this machine's own text, kill the process, resume from a step number, and compare.

In the order in which it happens: `folder` (where files are), `text` (what is read), `corpus` (a corpus of it), `model`,
`checkpoint` and `train` (one run, in a process of its own), `child` (that process as its parent sees it), `records` (what a
run did, and whether two did the same), `run` (all of it).
"""

from grain_sft.demo.run import run_demo
from grain_sft.demo.text import Entry, docstrings

__all__ = ["Entry", "docstrings", "run_demo"]
