"""trace: step <-> document. Which documents did these steps see, and when was this document seen?"""

from grain_sft.provenance.checkpoints import checkpoint_table, step_of_checkpoint, steps_between
from grain_sft.provenance.lines import Trace, find_document, iter_trace, trace
from grain_sft.provenance.summary import summarize

__all__ = [
    "Trace",
    "checkpoint_table",
    "find_document",
    "iter_trace",
    "step_of_checkpoint",
    "steps_between",
    "summarize",
    "trace",
]
