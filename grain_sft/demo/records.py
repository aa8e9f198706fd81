"""Records of what a run did at each step, one JSON object a line, and their comparison: loss by loss and batch by batch."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Record:
    """One step of a run."""

    step: int  # from 0
    loss_hex: str  # float32 loss before the step's update, as `float.hex` writes it: exact to the last bit
    batch_sha256: str  # hash of the batch that the step trained on

    @property
    def loss(self) -> float:
        """The loss in nats a token."""
        return float.fromhex(self.loss_hex)

    @property
    def short_hex(self) -> str:
        """The exact loss without the zeros that a float32 always ends with."""
        mantissa, mark, exponent = self.loss_hex.partition("p")
        return mantissa.rstrip("0") + mark + exponent

    def to_json(self) -> str:
        """Return one line, without its end."""
        return json.dumps({"step": self.step, "loss": self.loss, **dataclasses.asdict(self)})


Logs = Mapping[str, Sequence[Record]]
"""Records by the name of the run."""


def parse(line: str) -> Record | None:
    """Return the record in a line; None for any other line, and for one that was cut off."""
    try:
        return msgspec.json.decode(line, type=Record)
    except msgspec.DecodeError:
        return None


def batch_sha256(batch: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the hash of a batch: names, dtypes, shapes and values of all its arrays."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.data)
    return digest.hexdigest()


def difference(name: str, reference: str, steps: range, logs: Logs) -> str | None:
    """Return a sentence on the first of `steps` that run `name` did not log, once and in order, with the loss and the batch
    of run `reference`; None where there is none. No step at all is a difference."""
    if not steps:
        return f"The {name} run logged no step to compare."
    by_step = {record.step: record for record in logs[reference]}
    for step, mine in itertools.zip_longest(steps, logs[name]):
        if mine is None or mine.step != step:
            expected, found = ("no step" if each is None else f"step {each}" for each in (step, mine and mine.step))
            return f"The {name} run logged {found} where {expected} was expected."
        if (other := by_step.get(step)) is None:
            return f"Step {step} is missing from the {reference} run."
        for what, value, wanted in (
            ("batch has SHA-256", mine.batch_sha256, other.batch_sha256),
            ("batch is the same, but its loss is", mine.loss_hex, other.loss_hex),
        ):
            if value != wanted:
                runs = f"{value} in the {name} run and {wanted} in the {reference} run"
                return f"Step {step} is the first that differs: its {what} {runs}."
    return None


def table(names: Sequence[str], steps: Sequence[int], logs: Logs) -> list[str]:
    """Return lines with the losses of the runs side by side, as numbers and as exact hexadecimal floats."""
    by_step = {name: {record.step: record for record in logs[name]} for name in names}
    lines = [("step  " + "  ".join(f"{name:<21}" for name in names)).rstrip()]
    for step in steps:
        present = [by_step[name].get(step) for name in names]
        cells = ["-" if each is None else f"{each.loss:.4f} {each.short_hex}" for each in present]
        same = len({each and (each.loss_hex, each.batch_sha256) for each in present} - {None}) == 1
        lines.append(f"{step:4d}  " + "  ".join(f"{cell:<21}" for cell in cells) + ("  same" if same else "  DIFFERS"))
    return lines
