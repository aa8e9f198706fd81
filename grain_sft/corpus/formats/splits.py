"""Split: the token files that a format keeps in one place, and what its metadata say of them all."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.aligned import Part, scan_parts
from grain_sft.corpus.formats.metadata import Origin
from grain_sft.corpus.formats.options import Options, corpus_of
from grain_sft.corpus.shard import TOKEN_DTYPES
from grain_sft.errors import CorpusError
from grain_sft.storage import files

Dtype = np.dtype[np.unsignedinteger]

LEFT_OUT = "Or ignore the loss masks of all files with use_loss_mask=False."


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a corpus.

    Attributes:
      files: paths of all its token files, in order; () for token files that belong to no corpus.
      origin: what its metadata say.
      dtype: of the tokens, where metadata say it.
      dtypes: names of the dtypes that the format has.
      sources: path of the file of documents' sources; "" where there is none.
      continued: files whose first document began in the file before; None: not known.
    """

    files: tuple[str, ...] = ()
    origin: Origin = dataclasses.field(default_factory=Origin)
    dtype: Dtype | None = None
    dtypes: Sequence[str] = TOKEN_DTYPES
    sources: str = ""
    continued: frozenset[str] | None = None


def corpus_of_split(split: Split, parts: Sequence[Part], options: Options) -> Corpus:
    """Return the corpus of `parts`, scanned.

    Raises:
      CorpusFileError: a file is missing or unreadable.
      CorpusError: files that don't fit together, or masks for some parts only.
    """
    uses_loss = options.use_loss_mask is not False
    parts = with_masks(parts, options.masks)
    if uses_loss:
        _check_masks(parts)
    shards, dtype = scan_parts(parts, options.dtype or split.dtype, split.dtypes, use_loss=uses_loss)
    if options.masks is not None:
        check_mask_order([part.tokens for part in parts], options.masks)
    ignores_loss = not uses_loss and any(part.loss for part in parts)
    return corpus_of(shards, dtype, options, split.origin, split.sources, ignores_loss=ignores_loss)


def with_masks(parts: Sequence[Part], masks: Sequence[str] | None) -> list[Part]:
    """Return `parts` with label masks that the caller names, one for each part.

    Raises:
      CorpusError: more or fewer masks than parts.
    """
    if masks is None:
        return list(parts)
    check_mask_count([part.tokens for part in parts], masks)
    return [part._replace(loss=mask, kind="bool") for part, mask in zip(parts, masks, strict=True)]


def check_mask_count(tokens: Sequence[str], masks: Sequence[str]) -> None:
    """Check that there is a label mask for each token file.

    Raises:
      CorpusError: more or fewer.
    """
    if len(masks) != len(tokens):
        more = max(tokens, masks, key=len)
        raise CorpusError(
            f"label_mask_paths: {len(masks)} label masks for {len(tokens)} token files; expected one for each, in the order "
            f"of the token files. The first without a counterpart is {more[min(len(masks), len(tokens))]}."
        )


def check_mask_order(tokens: Sequence[str], masks: Sequence[str]) -> None:
    """Check that masks whose names have the numbers of the token files have them in the same order.

    Raises:
      CorpusError: the numbers are the same, in another order.
    """
    numbers = [[_last_number(path) for path in paths] for paths in (tokens, masks)]
    if numbers[0] == numbers[1] or sorted(numbers[0]) != sorted(numbers[1]):
        return
    token, mask = next(
        (token, mask) for token, mask, one, other in zip(tokens, masks, *numbers, strict=True) if one != other
    )
    raise CorpusError(
        f"label_mask_paths: {mask} is in the place of the label mask of {token}, and the numbers in their names differ. "
        "Globs are sorted as text, and directories by number. Name the masks in the order of the token files."
    )


def _last_number(path: str) -> int:
    """The last number in a file's name; -1 without one."""
    found = re.findall(r"\d+", files.name_of(path))
    return int(found[-1][:18]) if found else -1


def _check_masks(parts: Sequence[Part]) -> None:
    without = next((part for part in parts if not part.loss), None)
    having = next((part for part in parts if part.loss), None)
    if without is not None and having is not None:
        raise CorpusError(
            f"{without.tokens}: has no loss mask, but {having.tokens} has {having.loss}. Without one, all of its tokens would "
            f"take loss. Give the missing mask, or open the files without masks as a corpus of their own. {LEFT_OUT}"
        )
