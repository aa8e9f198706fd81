"""Mixture: sources and the share of the rows that each gives."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from grain_sft.deprecated import renamed_arguments
from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import check_choice, checked_entries
from grain_sft.sampling.proportions import OnExhausted, Proportions, as_shares
from grain_sft.sampling.streams import SourceOrder

Weight = int | float | str | Fraction


@renamed_arguments(when_dry="on_exhausted")
@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources and their weights: how often each gives a row.

    Weights are exact as written (0.7 is 7/10) and divided by their sum. After any number of rows each source is less than one
    row from its share, or for five and more weights of many digits less than two; see `Proportions`. A source that is a
    mixture has its share as a whole, and divides its rows among its own sources with the same bounds.

    Args:
      sources: Weight and rows of each source, by name. Rows are numbered through all sources in this order.
      on_exhausted: What happens when the `epochs` of a source are done. "repeat": no source has `epochs`. "stop": the mixture
        ends before the first row that the source lacks. "renormalize": the other sources divide its share, until none with a
        weight is left; a later weight in `schedule` does not count. "fail": as "stop", but the step with that row is a
        SamplerError. The `on_exhausted` of a source takes precedence.
      schedule: Pairs (step, weights by name), which hold from that step on. Rows before the step do not depend on them. Rows
        after it make up for what each source was behind or ahead of its share. A mixture that is a source and ends has none.

    Raises:
      SamplerError: Weights or a schedule that don't fit the sources.
    """

    sources: Mapping[str, tuple[Weight, SourceOrder | Mixture]]
    on_exhausted: OnExhausted = "repeat"
    schedule: tuple[tuple[int, Mapping[str, Weight]], ...] = ()
    _planned: Mapping[int, Mapping[str, Weight]] | None = dataclasses.field(default=None, repr=False, compare=False)
    """Weights from each step on before `reweighted`; None where it was not called."""

    def __post_init__(self) -> None:
        check_choice("on_exhausted", self.on_exhausted, OnExhausted)
        if not self.sources:
            raise SamplerError("a mixture of no sources: expected one or more.")
        object.__setattr__(self, "sources", dict(self.sources))
        object.__setattr__(self, "schedule", tuple(checked_entries(self.schedule, "(step, {name: weight})")))
        self._shares()
        for step, weights in self.schedule:
            if set(weights) != set(self.sources):
                expected = f"expected one for each of {', '.join(self.sources)} (0 for none)"
                raise SamplerError(f"schedule: step {step} has weights of {', '.join(weights)}; {expected}.")
            self._shares(weights)
        self._check_ends()

    def _shares(self, weights: Mapping[str, Weight] | None = None) -> tuple[Fraction, ...]:
        """Return the share of each source by `weights`; None means the weights before the schedule."""
        own = {name: weight for name, (weight, _) in self.sources.items()}
        return as_shares([(name, (weights or own)[name]) for name in self.sources])

    def _on_exhausted(self) -> list[OnExhausted]:
        """Return what happens when each source is exhausted."""
        return [(order and order.on_exhausted) or self.on_exhausted for _, order, _ in self.parts()]

    def _check_ends(self) -> None:
        ending = self._ending()
        endless = [name for name, how in zip(self.sources, self._on_exhausted(), strict=True) if how == "repeat"]
        if wrong := [name for name in ending if name in endless]:
            raise SamplerError(
                f"source {wrong[0]!r} ends (it has epochs, or is a mixture that ends), but on_exhausted='repeat' reads every "
                "source for ever. Leave its epochs out, or take on_exhausted='stop', 'renormalize' or 'fail'."
            )
        if self.on_exhausted != "repeat" and not ending:
            raise SamplerError(f"on_exhausted={self.on_exhausted!r}: no source is ever exhausted. Give max_epochs.")

    def _ending(self) -> list[str]:
        """Return the names of the sources that end."""
        return [name for name, (_, rows) in self.sources.items() if rows.num_rows is not None]

    def parts(self) -> Iterator[tuple[str, SourceOrder | None, Mixture | None]]:
        """Yield the name of each source, and its order or, for a mixture in this one, that mixture."""
        for name, (_, rows) in self.sources.items():
            yield (name, None, rows) if isinstance(rows, Mixture) else (name, rows, None)

    @property
    def changes(self) -> list[int]:
        """Steps at which its weights, or those of a mixture in it, change."""
        inner = [step for _, _, mixture in self.parts() if mixture is not None for step in mixture.changes]
        return [step for step, _ in self.schedule] + inner

    @property
    def num_instances(self) -> int:
        """Rows of all sources."""
        return sum(rows.num_instances for _, rows in self.sources.values())

    @property
    def num_rows(self) -> int | None:
        """Rows of all epochs. None where they never end, or depend on the batch sizes because the mixture has a schedule."""
        return None if self.schedule or not self._ending() else self.proportions(lambda step: 0).length

    @property
    def data_key(self) -> str:
        """All that decides the rows."""
        sources = ", ".join(
            f"{name!r}: ({share}, {rows.data_key})"
            for share, (name, (_, rows)) in zip(self._shares(), self.sources.items(), strict=True)
        )
        changes = [f"{step}: {list(map(str, self._shares(weights)))}" for step, weights in self.schedule]
        return f"Mixture({{{sources}}}, when_dry={self.on_exhausted!r}, schedule={{{', '.join(changes)}}})"

    def continued(self, starts: Mapping[str, tuple[int, int]], prefix: str = "") -> Mixture:
        """Return the mixture whose sources begin at `starts`: an epoch and an index, by `prefix` and name of the source."""
        made: dict[str, tuple[Weight, SourceOrder | Mixture]] = {}
        for (name, order, mixture), (weight, _) in zip(self.parts(), self.sources.values(), strict=True):
            if mixture is not None:
                made[name] = weight, mixture.continued(starts, f"{prefix}{name}/")
            elif order is not None:
                made[name] = weight, dataclasses.replace(order, start=starts.get(prefix + name, (0, 0)))
        return dataclasses.replace(self, sources=made)

    def reweighted(self, step: int, weights: Mapping[str, Weight]) -> Mixture:
        """Return the mixture with other weights of some sources from `step` on, each until its schedule changes it.

        Raises:
          SamplerError: The mixture does not have a source.
        """
        if unknown := weights.keys() - self.sources.keys():
            raise SamplerError(f"reweight {', '.join(sorted(unknown))}: the mixture has {', '.join(self.sources)}.")
        entries = {0: {name: weight for name, (weight, _) in self.sources.items()}, **dict(self.schedule)}
        planned = self._planned or dict(entries)
        entries.setdefault(step, entries[max(each for each in entries if each <= step)])
        before = planned[max(each for each in planned if each <= step)]
        for name, weight in weights.items():
            end = min((at for at in planned if at > step and planned[at][name] != before[name]), default=sys.maxsize)
            for at in entries:
                if step <= at < end:
                    entries[at] = {**entries[at], name: weight}
        sources = {name: (entries[0][name], rows) for name, (_, rows) in self.sources.items()}
        schedule = tuple((each, entries[each]) for each in sorted(entries) if each)
        return dataclasses.replace(self, sources=sources, schedule=schedule, _planned=planned)

    def proportions(self, rows_before: Callable[[int], int]) -> Proportions:
        """Return how the rows are divided among the sources; `rows_before` returns the number of rows before a step."""
        changes = {0: self._shares(), **{rows_before(step): self._shares(weights) for step, weights in self.schedule}}
        limits = [rows.num_rows for _, rows in self.sources.values()]
        return Proportions(list(changes.items()), limits, self._on_exhausted() if self._ending() else ())
