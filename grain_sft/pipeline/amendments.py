"""Amendments: changes of a run from a step on, which leave every batch before it as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.layout import Layout
from grain_sft.sampling import Sampler, SkippingSampler, Skips, Weight
from grain_sft.source import MixtureSource, NpyDataSource, Withdrawals
from grain_sft.storage import files

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

    Raises:
      PipelineError: a negative step or number of steps, or an amendment that changes nothing.
    """

    step: int
    skip: int = 0
    withdraw: Sequence[int] | Ints = ()
    reweight: Mapping[str, Weight] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", as_integer("amendment: step", self.step, 0, PipelineError))
        object.__setattr__(self, "skip", as_integer("amendment: skip", self.skip, 0, PipelineError))
        object.__setattr__(self, "withdraw", np.unique(np.asarray(self.withdraw, np.int64)))
        if not self.skip and not len(self.withdraw) and not self.reweight:
            expected = "a number of steps to skip, documents to withdraw, or weights"
            raise PipelineError(f"amendment from step {self.step}: changes nothing. Expected {expected}.")

    def __str__(self) -> str:
        """Text that decides the amendment, for receipts and states."""
        changes = [f"skip {self.skip} steps"] if self.skip else []
        if len(self.withdraw):
            listed = hashlib.sha256(np.ascontiguousarray(self.withdraw, "<i8").tobytes()).hexdigest()[:16]
            changes.append(f"withdraw {len(self.withdraw)} documents ({listed})")
        if self.reweight:
            changes.append(f"reweight {', '.join(f'{name}={weight}' for name, weight in self.reweight.items())}")
        return f"from step {self.step}: {', '.join(changes)}"


def begins_before(step: int | None, texts: Iterable[str | None]) -> bool:
    """Return whether one of `texts` is not an amendment's, or is that of an amendment from a step before `step`; None for no
    step."""
    steps = [_FROM.match(text) for text in texts if text is not None]
    return step is None or any(found is None or int(found[1]) < step for found in steps)


def check_same_amendments(there: Sequence[str], here: Sequence[Amendment], step: int) -> None:
    """Raise a PipelineError if the amendments of a run so far ("there") and its amendments now differ before `step`."""
    for number, texts in enumerate(itertools.zip_longest(there, map(str, here)), 1):
        if texts[0] != texts[1] and begins_before(step, texts):
            found, expected = (text or "there is none" for text in texts)
            raise PipelineError(
                f"the run continues at step {step}, and amendment {number} differs before it. In the state: {found}. In the "
                f"config: {expected}. Amend a run from its next step on, and keep its earlier amendments as they are."
            )


def amended(sampler: Sampler, amendments: Sequence[Amendment]) -> Sampler:
    """Return `sampler` with the skipped steps and the weights of `amendments`.

    Raises:
      SamplerError: weights for a sampler that is not of a mixture, or for sources that it does not have.
    """
    skips = [(each.step, each.skip) for each in amendments if each.skip]
    for each in sorted(amendments, key=lambda each: each.step):
        if each.reweight:
            sampler = sampler.reweighted(Skips(skips).data_step(each.step), each.reweight)
    return SkippingSampler(sampler, skips) if skips else sampler


def withdrawals_of(source: NpyDataSource | MixtureSource, amendments: Sequence[Amendment]) -> Withdrawals | None:
    """Return the documents that `amendments` withdraw; None if they withdraw none."""
    documents = [np.asarray(each.withdraw) for each in amendments]
    steps = [np.full(len(each.withdraw), each.step) for each in amendments]
    return Withdrawals(source, np.concatenate(documents), np.concatenate(steps)) if any(map(len, documents)) else None


def documents_named(layout: Layout, named: Iterable[int | str]) -> Ints:
    """Return the numbers of documents in a trace, int64 [n].

    Args:
      layout: Layout of the run.
      named: Each a document's number; `NAME:NUMBER`, a document of a mixture's source; `INPUT:LINE`, the record of an input
        that the corpus was prepared from; the name of a source or an input, for all its documents; or the path of a file of
        these, one a line.

    Raises:
      RowIndexError: a name that is none of these, or a document or record that does not exist.
      CorpusError, CorpusFileError: documents or files cannot be read.
    """
    found = [np.zeros(0, np.int64)]
    for each in named:
        if isinstance(each, int) or each.isdecimal():
            found.append(np.array([int(each)], np.int64))
        elif (numbers := _of_source(layout, each)) is not None:
            found.append(numbers)
        elif files.exists(each):
            lines = (line.strip() for line in files.read_text(each).splitlines())
            found.append(documents_named(layout, filter(None, lines)))
        else:
            raise RowIndexError(
                f"withdraw: {each!r} is not a document number, a source, SOURCE:NUMBER, an input, INPUT:LINE, or a file of "
                "these. Fix it, or give the path of an existing file."
            )
    return np.unique(np.concatenate(found))


def _of_source(layout: Layout, name: str) -> Ints | None:
    """Return the documents of a source or an input, or one of them as NAME:NUMBER; None if the run has no such name."""
    whole, _, number = name.rpartition(":")
    for source, one in ((name, None), (whole, number)):
        if one is not None and not one.isdecimal():
            continue
        if source and source in layout.parts:
            first = layout.first_document(source)
            return (
                np.arange(layout.parts[source].num_documents) + first if one is None else np.array([first + int(one)])
            )
        found = [_of_input(layout, part, source, one) for part in layout.parts]
        given = [numbers for numbers in found if numbers is not None]
        if given:
            numbers = np.concatenate(given)
            if not len(numbers):
                raise RowIndexError(f"withdraw: {name}: no document of the run was made of this record.")
            return numbers
    return None


def _of_input(layout: Layout, part: str, source: str, line: str | None) -> Ints | None:
    """Return the documents of `part` that were made of an input, or of one of its lines; None if it has no such input."""
    inner = layout.parts[part]
    names = inner.corpus.source_names
    inputs = [number for number, name in enumerate(names) if source in (name, files.name_of(name))]
    table = inner.sources if inner.follows_documents else inner.corpus.sources
    if not inputs or table is None:
        return None
    kept = np.isin(table[:, 0], inputs)
    if line is not None:
        kept &= table[:, 1] == int(line)
    return np.flatnonzero(kept) + layout.first_document(part)
