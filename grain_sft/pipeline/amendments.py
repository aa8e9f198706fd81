"""Amendments: changes of a run from a step on."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from grain_sft.arguments import as_integer, as_integers, check_type
from grain_sft.errors import PipelineError
from grain_sft.sampling import MappedSampler, Sampler, StepMap, Weight
from grain_sft.source import MixtureSource, NpyDataSource, Withdrawals
from grain_sft.types import Ints

_FROM = re.compile(r"from step (\d+): ")  # beginning of the text of an amendment or of a later stage


@dataclasses.dataclass(frozen=True, eq=False)  # a generated `==` would compare arrays, which have no single truth value
class Amendment:
    """Change of a run from a step on.

    Args:
      step: First step that differs.
      skip: Number of steps whose batches are left out. With `step` 10 and `skip` 3, step 10 gets the batch that step 13 had.
      withdraw: Numbers of documents, as a trace prints them. From `step` on, padding replaces the tokens of these documents.
      reweight: Weights of sources of a mixture from `step` on, by name of the source. Other sources keep their weights.
      replace: Note for the receipt that a new stage replaces a source of the run at `step`; else "". It names the source and
        the changed keys of its config. The stage makes the change.

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
        documents = as_integers(f"amendment from step {self.step}: withdraw", self.withdraw, PipelineError)
        # With `return_counts`, NumPy sorts the numbers, in 0.1 s for a million. Otherwise it hashes them, in 4 s.
        distinct, _ = np.unique(documents, return_counts=True)
        object.__setattr__(self, "withdraw", distinct)
        check_type("amendment: reweight", self.reweight, Mapping, "weights by name")
        check_type("amendment: replace", self.replace, str, "a text")
        if not (self.skip or len(self.withdraw) or self.reweight or self.replace):
            expected = "a number of steps to skip, documents to withdraw, or weights"
            raise PipelineError(f"amendment from step {self.step}: changes nothing. Expected {expected}.")

    def __str__(self) -> str:
        """Return the whole amendment as a text for receipts and states."""
        changes = []
        if self.replace:
            changes.append(f"replace {self.replace}")
        if self.skip:
            changes.append(f"skip {self.skip} steps")
        if len(self.withdraw):
            hash_of_numbers = hashlib.sha256(np.ascontiguousarray(self.withdraw, "<i8").tobytes()).hexdigest()[:16]
            changes.append(f"withdraw {len(self.withdraw)} documents ({hash_of_numbers})")
        if self.reweight:
            changes.append(f"reweight {', '.join(f'{name}={weight}' for name, weight in self.reweight.items())}")
        return f"from step {self.step}: {', '.join(changes)}"


def begins_before(step: int | None, texts: Iterable[str | None]) -> bool:
    """Return whether a part that differs between two receipts may change a batch before `step`; True if `step` is None.

    `texts` has the text of the part in each receipt; None for a receipt without the part. The text "from step 10: ..." means
    that the part changes no batch before step 10.
    """
    return step is None or any(first_step(text) < step for text in texts if text is not None)


def first_step(text: str) -> int:
    """Return the step from which on a part of a receipt changes batches: 10 for "from step 10: ...".

    For other texts, return -1, because they may change every batch.
    """
    match = _FROM.match(text)
    return -1 if match is None else int(match[1])


def check_same_changes(noun: str, of_state: Sequence[str], of_config: Sequence[str], step: int) -> None:
    """Raise a `PipelineError` if a state and a config differ in the changes of the run before `step`.

    Args:
      noun: Word for a change in the message: "amendment" or "later stage".
      of_state, of_config: Text of each change, such as "from step 10: skip 3 steps".
      step: Step at which the run continues.
    """
    for number, (in_state, in_config) in enumerate(itertools.zip_longest(of_state, of_config), 1):
        if in_state != in_config and begins_before(step, (in_state, in_config)):
            problem = f"the run continues at step {step}, but {noun} {number} differs, and begins before that step"
            found = f"In the state: {in_state or 'nothing'}. In the config: {in_config or 'nothing'}"
            fix = f"Keep every {noun} before step {step} as it is in the state, and begin new ones at step {step} or later"
            raise PipelineError(f"{problem}. {found}. {fix}.")


def amended(sampler: Sampler, amendments: Sequence[Amendment]) -> Sampler:
    """Return `sampler` with the skipped steps and the weights of `amendments`.

    Raises:
      SamplerError: `amendments` have weights of a source that `sampler` does not read.
    """
    skips = skips_of(amendments)
    reweights = reweights_of(amendments)
    if reweights:
        sampler = sampler.reweighted([(step, amendment.reweight) for step, amendment in reweights])
    return MappedSampler(sampler, skips) if skips else sampler


def skips_of(amendments: Iterable[Amendment]) -> list[tuple[int, int]]:
    """Return the pairs (step, number of skipped steps) for a `StepMap`."""
    return [(amendment.step, amendment.skip) for amendment in amendments if amendment.skip]


def reweights_of(amendments: Iterable[Amendment]) -> list[tuple[int, Amendment]]:
    """Return the pair (data step, amendment) of each amendment with weights, sorted by step.

    A data step counts the skipped steps too: with 3 steps skipped at step 5, step 10 is data step 13.
    """
    amendments = sorted(amendments, key=lambda amendment: amendment.step)
    skips = StepMap(skips_of(amendments))
    return [(skips.data_step(amendment.step), amendment) for amendment in amendments if amendment.reweight]


def withdrawals_of(source: NpyDataSource | MixtureSource, amendments: Sequence[Amendment]) -> Withdrawals | None:
    """Return the documents that `amendments` withdraw, each with the step of its amendment; None if there are none."""
    documents = [np.asarray(amendment.withdraw) for amendment in amendments]
    if not any(map(len, documents)):
        return None
    steps = [np.full(len(amendment.withdraw), amendment.step) for amendment in amendments]
    return Withdrawals(source, np.concatenate(documents), np.concatenate(steps))
