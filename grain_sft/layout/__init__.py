"""Layout: which spans of which documents make row i?"""

from grain_sft.layout.span import FILL_ROW, FillKey, Layout, Pieces, Span
from grain_sft.layout.windows import WindowLayout

__all__ = ["FILL_ROW", "FillKey", "Layout", "Pieces", "Span", "WindowLayout"]
