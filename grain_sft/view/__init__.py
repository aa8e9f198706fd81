"""Views of a run for people: the rows of a step, as terminal text or as an HTML page, and the report of a config."""

from grain_sft.view.inspect_page import inspect_page
from grain_sft.view.page import make_page, part
from grain_sft.view.pictures import COLOURS, Picture, Pictures, draw_bars, draw_pictures, require_matplotlib
from grain_sft.view.report import make_report
from grain_sft.view.report_page import report_page
from grain_sft.view.rows import Piece, RowView, view_rows
from grain_sft.view.terminal import row_lines, show, wants_colour
from grain_sft.view.text import texts_of

__all__ = [
    "COLOURS", "Picture", "Pictures", "Piece", "RowView", "draw_bars", "draw_pictures", "inspect_page", "make_page",
    "make_report", "part", "report_page", "require_matplotlib", "row_lines", "show", "texts_of", "view_rows", "wants_colour",
]  # fmt: skip
