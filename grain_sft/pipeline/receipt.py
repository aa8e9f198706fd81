"""Receipt: a short hash of everything that decides the batches of a run, with its parts.

Two people with the same receipt have the same batches. The other way round it holds for the same token files: hosts,
paths, threads, caches, and the machine that made a plan are not in it, nor is a seed where nothing is drawn; rows count as
they are, however they were packed. Files are in it by their sizes and ends, as in `Corpus.ends_fingerprint`; where documents
are found by EOS, which reads all tokens, also by the hash of every token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.html_table import html_facts
from grain_sft.layout import Layout, PackedLayout, PaddedLayout
from grain_sft.layout.mixture import MixtureLayout
from grain_sft.sampling import Host, IndexSampler, MixtureSampler, Sampler

if TYPE_CHECKING:
    from grain_sft.pipeline.pipeline import Pipeline

VERSION = 2
"""Of what is hashed, and how; in every code."""

_DIGITS = 16  # hexadecimal, of a code
_ROWS = 1 << 16  # of a padded layout hashed at once


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
        return f"gs{VERSION}-{_hash(json.dumps(self.parts))}"

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
            **_parts_of(layout),
            **_padding_of(layout),
            "sampler": _sampler(pipeline.sampler),
            "transforms": ", ".join(map(described, pipeline.transforms)) or "none",
        }
    )


def layout_receipt(layout: Layout) -> str:
    """A short hash of a layout's rows, corpus included, such as "rows2-3f9a0c61d2b47e55": what a plan decides."""
    return f"rows{VERSION}-{_hash(json.dumps(_parts_of(layout)))}"


def _parts_of(layout: Layout) -> dict[str, str]:
    if isinstance(layout, MixtureLayout):
        return {
            f"{key} of {name}": text
            for name, part in zip(layout.names, layout.parts, strict=True)
            for key, text in _parts_of(part).items()
        }
    corpus = layout.corpus
    stated = f"{corpus.num_tokens} {corpus.dtype.name} tokens in {len(corpus.shards)} shards, {corpus.ends_fingerprint}"
    tokens = _tokens(layout)
    return {"corpus": stated if tokens is None else f"{stated}, {tokens}", "layout": _rows(layout)}


def _tokens(layout: Layout) -> str | None:
    """Hash of every token, where the layout follows documents that its corpus finds by EOS alone."""
    if isinstance(layout, PackedLayout):
        return layout.tokens_content
    return layout.corpus.documents.tokens if isinstance(layout, PaddedLayout) else None


def _rows(layout: Layout) -> str:
    """The rows of a layout: by what they hold where documents are chosen for them, else by its options."""
    if isinstance(layout, PackedLayout):
        columns = ([np.diff(plan.ends, prepend=0), plan.start, plan.length] for plan in layout.plans)
        name = "packed"
    elif isinstance(layout, PaddedLayout):
        columns = (_columns(layout, first) for first in range(0, len(layout), _ROWS))
        name = "padded"
    else:
        return repr(layout)
    digests: list[hashlib.blake2b] = []  # one a column, so that it does not matter how rows are divided
    for some in columns:
        digests = digests or [hashlib.blake2b(digest_size=16) for _ in some]
        for digest, column in zip(digests, some, strict=True):
            digest.update(np.ascontiguousarray(column, "<i8").view(np.uint8).data)
    joined = _hash(" ".join(digest.hexdigest() for digest in digests), 32)
    return f"{len(layout)} {name} rows of {layout.sequence_length} tokens, {joined}"


def _columns(layout: PaddedLayout, first: int) -> list[npt.NDArray[np.int64]]:
    """Where the tokens of some rows from `first` on are."""
    found = layout.pieces(np.arange(first, min(first + _ROWS, len(layout))))
    assert found.segment is not None and found.position is not None
    return [found.row + first, found.column, found.shard, found.start, found.length, found.segment, found.position]


def _padding_of(layout: Layout) -> dict[str, str]:
    if not isinstance(layout, MixtureLayout):
        return {"padding": f"token {layout.corpus.padding_token_id}"}
    return {
        f"padding of {name}": f"token {part.corpus.padding_token_id}"
        for name, part in zip(layout.names, layout.parts, strict=True)
    }


def _sampler(sampler: Sampler) -> str:
    """What decides the rows of all hosts together: of the host at most how many there are, and no seed that is not
    used."""
    if isinstance(sampler, MixtureSampler):
        return sampler.data_key
    state = sampler.__getstate__() | {"host": Host(0, sampler.host.count)}
    if not sampler.shuffle or sampler.order == "sequential":
        state["seed"] = 0
    return IndexSampler(**state).data_key


def _hash(text: str, digits: int = _DIGITS) -> str:
    return hashlib.sha256(f"grain_sft receipt {VERSION}\0{text}".encode()).hexdigest()[:digits]
