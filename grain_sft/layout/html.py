"""What a notebook shows of a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grain_sft.html_table import html_facts

if TYPE_CHECKING:
    from grain_sft.layout.span import Layout


def html_layout(layout: Layout) -> str:
    """Return a short table about a layout's rows."""
    facts = {
        "rows": len(layout),
        "tokens a row": layout.sequence_length,
        "segments a row": f"{layout.mean_segments:.2f} on average",
        "corpus": f"{layout.corpus.num_tokens:,} tokens in {len(layout.corpus.shards):,} shards",
        "options": repr(layout),
    }
    return html_facts(type(layout).__name__, facts)
