"""What the demo trains on: corpora that it makes of this machine's own text, chosen by name."""

from __future__ import annotations

from collections.abc import Mapping

from grain_sft.demo.data.chat import CHAT
from grain_sft.demo.data.data import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, Data, Made
from grain_sft.demo.data.mix import TEXT

__all__ = ["DATA", "GLOBAL_BATCH_SIZE", "SEQUENCE_LENGTH", "VOCAB_SIZE", "Data", "Made"]

DATA: Mapping[str, Data] = {data.name: data for data in (CHAT, TEXT)}
