"""Receipt: a short hash of everything that decides the batches of a run, with its parts.

Two people with the same receipt have the same batches. The other way round it holds for the same token files: hosts,
paths, threads, caches, and the machine that made a plan are not in it, nor is a seed where nothing is drawn; rows count as
they are, however they were packed. Files are in it by their sizes and ends, as in `Corpus.ends_fingerprint`; where documents
are found by EOS, which reads all tokens, also by the hash of every token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grain_sft.html_table import html_facts
from grain_sft.layout import RECEIPT_VERSION as VERSION
from grain_sft.layout import Layout, digest

if TYPE_CHECKING:
    from grain_sft.pipeline.pipeline import Pipeline


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What decides the global batches of a run.

    Attributes:
      parts: by name, in the order in which data flows: corpus, layout, padding, sampler, transforms; of a mixture the first
        three for each source, "corpus of NAME". Each is a line of
        text that says, by a hash or in words, all that this part decides.
    """

    parts: dict[str, str]

    @property
    def code(self) -> str:
        """All parts as one short hash, such as "gs2-3f9a0c61d2b47e55"."""
        return f"gs{VERSION}-{digest(json.dumps(self.parts))}"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the code and the parts."""
        return {"receipt": self.code, "parts": dict(self.parts)}

    def differences(self, other: Mapping[str, str]) -> list[str]:
        """A sentence for each part that is not as in `other`, the parts of another receipt; none where all are."""
        found = []
        for name in dict.fromkeys((*self.parts, *other)):
            mine, theirs = self.parts.get(name), other.get(name)
            if mine != theirs:
                found.append(f"{name} differs: here {mine or 'there is none'}; there {theirs or 'there is none'}.")
        return found

    def __str__(self) -> str:
        return self.code

    def _repr_html_(self) -> str:
        return html_facts(f"Receipt {self.code}", self.parts)


def receipt_of(pipeline: Pipeline) -> Receipt:
    """The receipt of a pipeline; the same on all hosts. Hashes a plan at the speed of memory; reads tokens only where they
    are what documents were found in.

    Raises:
      CorpusFileError, CorpusError: as the layout does, when it has to find documents.
    """
    from grain_sft.pipeline.pipeline import described

    layout = pipeline.source.layout
    return Receipt(
        {
            **layout.receipt,
            **_padding_of(layout),
            "sampler": pipeline.sampler.receipt,
            "transforms": ", ".join(map(described, pipeline.transforms)) or "none",
        }
    )


def layout_receipt(layout: Layout) -> str:
    """A short hash of a layout's rows, corpus included, such as "rows2-3f9a0c61d2b47e55": what a plan decides."""
    return f"rows{VERSION}-{digest(json.dumps(layout.receipt))}"


def _padding_of(layout: Layout) -> dict[str, str]:
    parts = layout.parts.items()
    return {
        f"padding of {name}" if name else "padding": f"token {part.corpus.padding_token_id}" for name, part in parts
    }
