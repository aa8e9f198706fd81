"""Records of what a run did at each step, one JSON object a line, and their comparison: loss by loss and batch by batch."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Record:
    """One step of a run.

    Attributes:
      step: Step, from 0.
      loss_hex: Loss before the step's update, float32, as `float.hex` writes it: exact to the last bit.
      batch_sha256: Hash of the batch that the step trained on.
    """

    step: int
    loss_hex: str
    batch_sha256: str

    @property
    def loss(self) -> float:
        """The loss in nats a token."""
        return float.fromhex(self.loss_hex)

    def to_json(self) -> str:
        """Return one line, without its end."""
        return json.dumps({"step": self.step, "loss": self.loss, **dataclasses.asdict(self)})


Logs = Mapping[str, Sequence[Record]]
"""Records by the name of the run."""


def parse(line: str) -> Record | None:
    """Return the record in a line; None for any other line, and for one that was cut off."""
    try:
        data = json.loads(line)
        record = Record(int(data["step"]), str(data["loss_hex"]), str(data["batch_sha256"]))
        _ = record.loss
    except (ValueError, KeyError, TypeError):
        return None
    return record


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
    expected = {record.step: record for record in logs[reference]}
    if not steps:
        return f"The {name} run logged no step to compare."
    if len(expected) != len(logs[reference]):
        return f"The {reference} run logged a step twice."
    for step, mine in itertools.zip_longest(steps, logs[name]):
        other = expected.get(step)
        if mine is None:
            return f"Step {step} is missing from the {name} run."
        if step is None:
            return f"Step {mine.step} was logged by the {name} run after its last, {steps[-1]}."
        if mine.step != step:
            return f"Step {step} was expected from the {name} run, which logged step {mine.step} in its place."
        if other is None:
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
        cells = ["-" if record is None else f"{record.loss:.4f} {_short(record.loss_hex)}" for record in present]
        same = len({record and (record.loss_hex, record.batch_sha256) for record in present} - {None}) == 1
        lines.append(f"{step:4d}  " + "  ".join(f"{cell:<21}" for cell in cells) + ("  same" if same else "  DIFFERS"))
    return lines


def _short(number: str) -> str:
    """Return a hexadecimal float without the zeros that a float32 always ends with."""
    mantissa, mark, exponent = number.partition("p")
    return mantissa.rstrip("0") + mark + exponent
