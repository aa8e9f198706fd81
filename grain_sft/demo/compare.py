"""Did two runs do the same? Loss by loss, to the last bit, and batch by batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from grain_sft.demo.log import Record

Logs = Mapping[str, Sequence[Record]]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The verdict on one run.

    Attributes:
      name: of the run.
      reference_name: of the run it was compared with.
      steps: that it should hold, each once and in order.
      difference: a sentence on the first step that differs; None where all are equal.
    """

    name: str
    reference_name: str
    steps: range
    difference: str | None

    @property
    def equal(self) -> bool:
        """Whether every step of `steps` has the same loss and the same batch in both runs."""
        return self.difference is None


def compare(name: str, reference_name: str, steps: range, logs: Logs) -> Comparison:
    """Compare the `steps` of run `name` with the same steps of run `reference_name`, by what they logged.

    No step at all is a difference, and so is one that is missing, out of order, or was logged twice.
    """
    return Comparison(name, reference_name, steps, _difference(name, reference_name, steps, logs))


def _difference(name: str, reference_name: str, steps: range, logs: Logs) -> str | None:
    run, reference = logs[name], {record.step: record for record in logs[reference_name]}
    if not steps:
        return f"The {name} run logged no step to compare."
    if len(reference) != len(logs[reference_name]):
        return f"The {reference_name} run logged a step twice."
    for place, step in enumerate(steps):
        if place >= len(run):
            return f"Step {step} is missing from the {name} run."
        if run[place].step != step:
            return f"Step {step} was expected from the {name} run, which logged step {run[place].step} in its place."
        if step not in reference:
            return f"Step {step} is missing from the {reference_name} run."
        mine, other = run[place], reference[step]
        if mine.batch_sha256 != other.batch_sha256:
            return (
                f"Step {step} is the first that differs: its batch has SHA-256 {mine.batch_sha256} in the {name} run "
                f"and {other.batch_sha256} in the {reference_name} run."
            )
        if mine.loss_hex != other.loss_hex:
            return (
                f"Step {step} is the first that differs: its loss is {mine.loss_hex} in the {name} run and "
                f"{other.loss_hex} in the {reference_name} run, on the same batch."
            )
    if len(run) > len(steps):
        return f"Step {run[len(steps)].step} was logged by the {name} run after its last, {steps[-1]}."
    return None


def table(names: Sequence[str], steps: Sequence[int], logs: Logs) -> list[str]:
    """Lines that show the losses of the runs side by side, as numbers and as exact hexadecimal floats."""
    by_step = {name: {record.step: record for record in logs[name]} for name in names}
    lines = [("step  " + "  ".join(f"{name:<21}" for name in names)).rstrip()]
    for step in steps:
        present = [by_step[name].get(step) for name in names]
        cells = ["-" if record is None else f"{record.loss:.4f} {_short(record.loss_hex)}" for record in present]
        same = len({record and (record.loss_hex, record.batch_sha256) for record in present} - {None}) == 1
        lines.append(f"{step:4d}  " + "  ".join(f"{cell:<21}" for cell in cells) + ("  same" if same else "  DIFFERS"))
    return lines


def _short(number: str) -> str:
    """A hexadecimal float without the zeros that a float32 always ends in."""
    mantissa, mark, exponent = number.partition("p")
    return mantissa.rstrip("0") + mark + exponent
