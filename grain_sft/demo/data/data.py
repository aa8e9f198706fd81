"""Data: a corpus that the demo can make, and the layout that rows of it have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grain_sft.corpus import Corpus
from grain_sft.layout import Layout

VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 256  # tokens
GLOBAL_BATCH_SIZE = 8  # rows


@dataclasses.dataclass(frozen=True)
class Made:
    """What was made.

    Attributes:
      corpus: the tokens.
      said: of what it was made, for people.
    """

    corpus: Corpus
    said: str


@dataclasses.dataclass(frozen=True)
class Data:
    """One kind of data.

    Attributes:
      name: in `DATA`.
      make: makes it in a folder that is there and empty, of so many characters of text at most.
      layout: what the config says of it beside the sequence length.
      transforms: as the config has them.
      describe: the rows of a layout, for people.
    """

    name: str
    make: Callable[[Path, int], Made]
    layout: Mapping[str, Any]
    transforms: tuple[str, ...]
    describe: Callable[[Layout], str]
