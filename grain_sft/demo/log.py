"""Records: what a run did at each step, one JSON object a line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.demo.folder import writing


@dataclasses.dataclass(frozen=True)
class Record:
    """One step of a run.

    Attributes:
      step: from 0.
      loss_hex: the loss before the step's update, float32, as `float.hex` writes it: exact to the last bit.
      batch_sha256: of the batch that the step trained on.
    """

    step: int
    loss_hex: str
    batch_sha256: str

    @property
    def loss(self) -> float:
        """In nats a token."""
        return float.fromhex(self.loss_hex)

    def to_json(self) -> str:
        """One line, without its end."""
        return json.dumps({"step": self.step, "loss": self.loss, **dataclasses.asdict(self)})


def parse(line: str) -> Record | None:
    """The record in a line; None for any other line, and for one that was cut off."""
    try:
        data = json.loads(line)
        record = Record(int(data["step"]), str(data["loss_hex"]), str(data["batch_sha256"]))
        record.loss  # noqa: B018, raises where it is no number
    except (ValueError, KeyError, TypeError):
        return None
    return record


def append(path: Path, record: Record) -> None:
    """Add one line to the log at `path`, in one write, so that a killed process leaves whole lines.

    Raises:
      StorageError: the disk is full or can't be written to.
    """
    with writing(path), open(path, "ab", buffering=0) as file:
        file.write(record.to_json().encode() + b"\n")


def read(path: Path) -> list[Record]:
    """The records of a log in order; empty where there is no such file."""
    if not path.exists():
        return []
    return [record for line in path.read_text("utf-8").splitlines() if (record := parse(line)) is not None]


def batch_sha256(batch: Mapping[str, npt.NDArray[Any]]) -> str:
    """Hash of a batch: names, dtypes, shapes and values of all its arrays."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.data)
    return digest.hexdigest()
