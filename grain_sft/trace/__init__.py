"""trace: step <-> document. Which documents did these steps see, and when was this document seen?"""

from grain_sft.trace.lines import Trace, find_document, iter_trace, trace

__all__ = ["Trace", "find_document", "iter_trace", "trace"]
