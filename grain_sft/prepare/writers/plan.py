"""What writers share: where a corpus is being written, from what, and in which pieces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from grain_sft.corpus.formats.metadata import SPLIT, split_metadata
from grain_sft.errors import PrepareError
from grain_sft.prepare.request import Request
from grain_sft.prepare.splits import Rule, Splits
from grain_sft.prepare.store import Block, Ids, Source
from grain_sft.storage import files


@dataclasses.dataclass(frozen=True)
class Task:
    """A piece of a split that is written by itself: documents `start` to `stop` of its order.

    Attributes:
      split: "train" or "val".
      number: of the piece in its split, from 0.
      skip: tokens of the first document that are in the piece before.
      tokens: in this piece.
    """

    split: str
    number: int
    start: int
    stop: int
    skip: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class SplitStatistics:
    """Counts of one split."""

    documents: int = 0
    tokens: int = 0
    trainable_tokens: int = 0
    truncated: int = 0
    cut_tokens: int = 0
    cut_trainable_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A corpus that is about to be written.

    Attributes:
      folder: where to, local or remote; not yet the output's own name.
      request: as given.
      tokenizer: its description, as JSON.
      documents: to read from.
      splits: the order of each split.
      statistics: of each split.
      binary: whether every weight is 0 or 1.
      source_names: paths of the inputs that `sources` counts.
    """

    folder: str
    request: Request
    tokenizer: Mapping[str, Any]
    documents: Source
    splits: Splits
    statistics: Mapping[str, SplitStatistics]
    binary: bool
    source_names: Sequence[str] = ()

    def path(self, *names: str) -> str:
        """A path below the folder."""
        return files.join(self.folder, *names)

    def blocks(self, task: Task) -> Iterator[Block]:
        """The documents of a task, some at a time."""
        return self.documents.blocks(self.splits[task.split][task.start : task.stop])

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        with files.atomic_write(self.path(name)) as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_metadata(self, split: str, *names: str, eos_token_id: int | None) -> None:
        """Write corpus.json into a split's folder: what the split needs where it is copied alone.

        Args:
          split: "train" or "val".
          names: the split's folder, below that of the corpus.
          eos_token_id: of the token that ends a document, in the meaning of the format.
        """
        self.write_json("/".join([*names, SPLIT]), self.metadata(split, eos_token_id))

    def metadata(self, split: str, eos_token_id: int | None) -> dict[str, Any]:
        """Return the metadata of a split that travel with it."""
        return split_metadata(
            format=self.request.format,
            split=split,
            eos_token_id=eos_token_id,
            pad_token_id=self.tokenizer.get("pad_token_id"),
            tokenizer=self.request.tokenizer or None,
            tokenizer_sha256=self.tokenizer.get("sha256"),
            vocab_size=self.tokenizer.get("vocab_size"),
            source_names=self.source_names,
        )

    def write_sources(self, split: str, *names: str) -> None:
        """Write the file of a split's sources: int64 little-endian pairs (input, line)."""
        with files.atomic_write(self.path(*names), "wb") as file:
            for some in self.documents.sources(self.splits[split]):
                file.write(some.astype("<i8").tobytes())


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of corpora on disk.

    Attributes:
      rule: which documents go to which split, in which order.
      check: raises PrepareError if the plan's documents can't be held.
      tasks: the pieces of a split, in order.
      write: write one piece: files that appear whole.
      finish: metadata, when all pieces are there.
    """

    rule: Rule
    check: Callable[[Plan], None]
    tasks: Callable[[Plan, str], list[Task]]
    write: Callable[[Plan, Task], None]
    finish: Callable[[Plan], None]


def refuse_weights(plan: Plan, says: str) -> None:
    """Refuse a plan with weights, for a format that holds none; `says` names it and the part that would hold them.

    Raises:
      PrepareError: some weight is neither 0 nor 1.
    """
    if not plan.binary:
        raise PrepareError(
            f"format {says} only yes or no, but this template gave weights other than 0 and 1. "
            "Choose the format openchat or episodes, or leave --seq-level-weight and weights out."
        )


def whole_split(plan: Plan, split: str) -> list[Task]:
    """One piece for all of a split."""
    ids = plan.splits[split]
    return [Task(split, 0, 0, len(ids), 0, plan.statistics[split].tokens)]


def running_length(plan: Plan, ids: Ids) -> Iterator[tuple[int, Ids]]:
    """(number of the first, tokens) [documents] of `ids`, some at a time."""
    for begin in range(0, len(ids), 1 << 16):
        yield begin, plan.documents.lengths[ids[begin : begin + (1 << 16)]].astype(np.int64)
