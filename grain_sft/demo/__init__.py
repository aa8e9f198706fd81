"""`grain-sft demo`: train on this machine's own text, kill the process, resume from a step number, and compare.

`run` does it in order: `corpus` of `text`; `train` with `model` in a process of its own; comparison of `records`.
"""

from grain_sft.demo.run import run_demo
from grain_sft.demo.text import Entry, docstrings

__all__ = ["Entry", "docstrings", "run_demo"]
