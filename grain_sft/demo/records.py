"""Records of what a training run did at each step, one JSON object a line, and their comparison."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec


class Record(msgspec.Struct, frozen=True):
    """One step of a run."""

    step: int  # from 0
    loss: float  # nats a token before the step's update: a float32, so that JSON has it exactly
    batch_sha256: str  # hash of the batch that the step trained on


Logs = Mapping[str, Sequence[Record]]
"""Records by the name of the run."""


def parse(line: str) -> Record | None:
    """Return the record in a line; None for any other line, and for one that was cut off."""
    try:
        return msgspec.json.decode(line, type=Record)
    except msgspec.DecodeError:
        return None


def difference(name: str, reference: str, steps: range, logs: Logs) -> str | None:
    """Return a sentence on the first of `steps` that run `name` did not log, once and in order, as run `reference` did."""
    by_step = {record.step: record for record in logs[reference]}
    for step, mine in itertools.zip_longest(steps, logs[name]):
        if mine is None or mine.step != step:
            found, expected = ("no step" if each is None else f"step {each}" for each in (mine and mine.step, step))
            return f"The {name} run logged {found} where {expected} was expected."
        if mine != by_step.get(step):
            runs = f"{by_step.get(step)} in the {reference} run and {mine} in the {name} run"
            return f"Step {step} is the first that differs: {runs}."
    return None


def table(names: Sequence[str], steps: Sequence[int], logs: Logs) -> list[str]:
    """Return lines with the losses of the runs side by side, as numbers and as exact hexadecimal floats."""
    by_step = {name: {record.step: record for record in logs[name]} for name in names}
    lines = [("step  " + "  ".join(f"{name:<21}" for name in names)).rstrip()]
    for step in steps:
        present = [by_step[name].get(step) for name in names]
        cells = ["-" if each is None else f"{each.loss:.4f} {_exact(each.loss)}" for each in present]
        same = len({each for each in present if each is not None}) == 1
        lines.append(f"{step:4d}  " + "  ".join(f"{cell:<21}" for cell in cells) + ("  same" if same else "  DIFFERS"))
    return lines


def _exact(loss: float) -> str:
    """Return the float in hexadecimal, without the zeros that a float32 ends with."""
    mantissa, mark, exponent = loss.hex().partition("p")
    return mantissa.rstrip("0") + mark + exponent
