"""Layouts of the corpora of packed_corpora.py, and the digests of their rows that golden files hold."""

import dataclasses
import gzip
from pathlib import Path
from typing import Any

import numpy as np
from packed_corpora import BOS, EOS, PAD, PackedCase, olmo_doc_lengths, row_digest

from grain_sft import Corpus, NpyDataSource, PackedLayout, open_corpus


def open_case(case: PackedCase, folder: Path, written: tuple[list[Path], list[Path]]) -> Corpus:
    where = folder if written[1] else list(map(str, written[0]))
    return dataclasses.replace(open_corpus(where, dtype=case.dtype, eos_token_id=EOS), pad_token_id=PAD)


def write_boundaries(case: PackedCase, tokens: list[Path]) -> None:
    """Write `start,end,id,src,loc` of each document next to the token files, as Dolma's tokenizer does."""
    for path in tokens:
        ids = np.fromfile(path, case.dtype)
        ends = np.flatnonzero(ids == EOS) + 1
        if case.bos:
            ends = np.array([end for end in ends if end == len(ids) or ids[end] == BOS])
        with gzip.open(path.with_suffix(".csv.gz"), "wt") as file:
            file.writelines(f"{start},{end},x,y,0\n" for start, end in zip([0, *ends[:-1]], ends, strict=True))


def packing_of(case: PackedCase) -> dict[str, Any]:
    return {"long_documents": case.long, "source_group_size": case.group, "bos_token_id": BOS if case.bos else None}


def row_digests(case: PackedCase, layout: PackedLayout) -> tuple[list[str], list[list[list[int]]]]:
    """Return the digest of each row, and the ranges of tokens that the row reads, as (file, start, stop)."""
    read, digests, places = NpyDataSource(layout).read(range(len(layout))), [], []
    for row in range(len(layout)):
        places.append([[span.shard, span.start, span.stop] for span in layout.spans(row)])
        lengths = olmo_doc_lengths(read["segment_ids"][row], read["tokens"][row], case.bos)
        digests.append(row_digest(read["tokens"][row], read["loss_mask"][row], lengths, places[-1]))
    return digests, places
