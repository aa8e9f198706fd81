"""What people look at: rows of a step as text, on the terminal and as a page; a report of a whole config."""

from grain_sft.view.report import make_report
from grain_sft.view.rows import Piece, RowView, view_rows

__all__ = ["Piece", "RowView", "make_report", "view_rows"]
