"""Amendments: changes of a run from a step on, which leave every batch before it as it is."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError, shortened
from grain_sft.sampling import MappedSampler, Sampler, StepMap, Weight
from grain_sft.source import MixtureSource, NpyDataSource, Withdrawals

Ints = npt.NDArray[np.int64]

_FROM = re.compile(r"from step (\d+): ")


@dataclasses.dataclass(frozen=True, eq=False)
class Amendment:
    """Change of a run from a step on.

    Args:
      step: First step that differs.
      skip: Number of steps whose batches are left out: `step` gets the batch of step `step + skip`, and so on.
      withdraw: Numbers of documents, as a trace prints them, whose tokens are padding from `step` on.
      reweight: Weights of sources of a mixture from `step` on, by name; the others stay.
      replace: Name of the source that is replaced in the stage from `step` on, and the keys that differ, for records of the
        run.

    Raises:
      PipelineError: A step or a number of steps is negative, a document is not an integer, or the amendment changes nothing.
    """

    step: int
    skip: int = 0
    withdraw: Sequence[int] | Ints = ()
    reweight: Mapping[str, Weight] = dataclasses.field(default_factory=dict)
    replace: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", as_integer("amendment: step", self.step, 0, PipelineError))
        object.__setattr__(self, "skip", as_integer("amendment: skip", self.skip, 0, PipelineError))
        object.__setattr__(self, "withdraw", self._sorted(np.asarray(self.withdraw)))
        if not (self.skip or len(self.withdraw) or self.reweight or self.replace):
            expected = "a number of steps to skip, documents to withdraw, or weights"
            raise PipelineError(f"amendment from step {self.step}: changes nothing. Expected {expected}.")

    def _sorted(self, given: npt.NDArray[Any]) -> Ints:
        """Return the distinct numbers of documents, ascending. numpy's `unique` hashes them and takes ten times as long."""
        if given.size and (given.ndim != 1 or given.dtype.kind not in "iu"):
            found = f"withdraw={shortened(repr(self.withdraw))}"
            raise PipelineError(f"amendment from step {self.step}: {found}. Expected a list of integers.")
        ascending = np.sort(given.astype(np.int64))
        once: Ints = ascending[np.append(True, ascending[1:] > ascending[:-1])[: len(ascending)]]
        return once

    def __str__(self) -> str:
        """Return all that decides the amendment as text, for receipts and states."""
        changes = [f"replace {self.replace}"] if self.replace else []
        changes += [f"skip {self.skip} steps"] if self.skip else []
        if len(self.withdraw):
            listed = hashlib.sha256(np.ascontiguousarray(self.withdraw, "<i8").tobytes()).hexdigest()[:16]
            changes.append(f"withdraw {len(self.withdraw)} documents ({listed})")
        if self.reweight:
            changes.append(f"reweight {', '.join(f'{name}={weight}' for name, weight in self.reweight.items())}")
        return f"from step {self.step}: {', '.join(changes)}"


def begins_before(step: int | None, texts: Iterable[str | None]) -> bool:
    """Return whether one part of several receipts may decide steps before `step`; None means all steps.

    `texts` are the part's text in each receipt, None where it is absent. It decides earlier steps unless each of its texts is
    a change from `step` on.
    """
    changes = [_FROM.match(text) for text in texts if text is not None]
    return step is None or any(change is None or int(change[1]) < step for change in changes)


def check_same_changes(noun: str, there: Sequence[str], here: Sequence[str], step: int) -> None:
    """Raise a PipelineError if the changes in a state (`there`) and in a config (`here`) differ before `step`. `noun` names
    them: "amendment" or "later stage"."""
    for number, texts in enumerate(itertools.zip_longest(there, here), 1):
        if texts[0] != texts[1] and begins_before(step, texts):
            found, expected = (text or "nothing" for text in texts)
            raise PipelineError(
                f"the run continues at step {step}, and {noun} {number} differs before it. In the state: {found}. In the "
                f"config: {expected}. Change a run from its next step on, and keep its earlier {noun}s as they are."
            )


def amended(sampler: Sampler, amendments: Sequence[Amendment]) -> Sampler:
    """Return `sampler` with the skipped steps and the weights of `amendments`.

    Raises:
      SamplerError: There are weights, but the sampler is not that of a mixture or lacks a source.
    """
    skips = [(each.step, each.skip) for each in amendments if each.skip]
    for each in sorted(amendments, key=lambda each: each.step):
        if each.reweight:
            sampler = sampler.reweighted(StepMap(skips).data_step(each.step), each.reweight)
    return MappedSampler(sampler, skips) if skips else sampler


def withdrawals_of(source: NpyDataSource | MixtureSource, amendments: Sequence[Amendment]) -> Withdrawals | None:
    """Return the documents that `amendments` withdraw; None if they withdraw none."""
    documents = [np.asarray(each.withdraw) for each in amendments]
    steps = [np.full(len(each.withdraw), each.step) for each in amendments]
    return Withdrawals(source, np.concatenate(documents), np.concatenate(steps)) if any(map(len, documents)) else None
