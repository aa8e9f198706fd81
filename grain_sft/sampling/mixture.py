"""Mixture: several sources of rows, and how often each source gives a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import get_args

from grain_sft.arguments import check_choice, check_type
from grain_sft.deprecated import renamed_arguments
from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import MOST_ROWS, checked_entries
from grain_sft.sampling.proportions import OnExhausted, Proportions, as_shares
from grain_sft.sampling.streams import SourceOrder

Weight = int | float | str | Fraction
"""Weight of a source, 0 or more; a text is a number, such as "0.7" or "1/3"."""


@renamed_arguments(when_dry="on_exhausted")
@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources of rows and their weights.

    The share of a source is its weight divided by the sum of all weights. Weights are exact as written: 0.7 is 7/10. Of the
    first 100 rows, a source with the share 1/3 gives 33 or 34, which differs from 100/3 by less than one row. With five or more
    weights of many digits, the difference is less than two rows (see `Proportions`). A source may itself be a mixture.

    Args:
      sources: Pair (weight, SourceOrder or Mixture) of each source, by name. Row numbers count through all sources in this
        order.
      on_exhausted: What happens after the last epoch of a source. A source's own `on_exhausted` takes precedence.
        - "repeat": Sources never end, so none may have `epochs`.
        - "stop": The mixture ends when its next row would come from the source that has no row left.
        - "fail": A step that needs a row of a source that has none left raises a SamplerError.
        - "renormalize": The other sources divide the share of the ended source. The mixture ends when every source with a
          weight above 0 has ended, even if `schedule` gives another source a weight later.
      schedule: Pairs (step, weights by name). The weights hold from the step on. If a source is behind its share of
        all rows before the step, it gets more rows after the step. A mixture that ends cannot have a schedule if it is a source
        of another mixture.

    Raises:
      SamplerError: Weights or a schedule that don't fit the sources.
    """

    sources: Mapping[str, tuple[Weight, SourceOrder | Mixture]]
    on_exhausted: OnExhausted = "repeat"
    schedule: tuple[tuple[int, Mapping[str, Weight]], ...] = ()

    def __post_init__(self) -> None:
        check_choice("on_exhausted", self.on_exhausted, get_args(OnExhausted), SamplerError)
        check_type("sources", self.sources, Mapping, "pairs (weight, SourceOrder or Mixture) by name")
        if not self.sources:
            raise SamplerError("a mixture of no sources: expected one or more.")
        object.__setattr__(self, "sources", dict(self.sources))
        for name, source in self.sources.items():
            if not isinstance(source, tuple | list) or len(source) != 2:
                raise SamplerError(f"source {name!r}: {source!r}; expected (weight, SourceOrder or Mixture).")
            check_type(f"source {name!r}", source[1], SourceOrder | Mixture, "a SourceOrder or Mixture")
        object.__setattr__(self, "schedule", tuple(checked_entries(self.schedule, "(step, {name: weight})")))
        for step, weights in self._weights.items():
            check_type(f"schedule: the value at step {step}", weights, Mapping, "weights by name")
            if set(weights) != set(self.sources):
                expected = f"expected one for each of {', '.join(self.sources)} (0 for none)"
                raise SamplerError(f"schedule: step {step} has weights of {', '.join(weights)}; {expected}.")
            self._shares(weights)  # raises an error for a wrong weight
        self._check_ends()

    @property
    def _weights(self) -> dict[int, Mapping[str, Weight]]:
        """For step 0 and each step of the schedule, the weights by name that hold from that step on."""
        return {0: {name: weight for name, (weight, _) in self.sources.items()}, **dict(self.schedule)}

    def _shares(self, weights: Mapping[str, Weight]) -> tuple[Fraction, ...]:
        return as_shares([(name, weights[name]) for name in self.sources])

    def _on_exhausted(self) -> list[OnExhausted]:
        return [
            self.on_exhausted if order is None or order.on_exhausted is None else order.on_exhausted
            for _, order, _ in self.parts()
        ]

    def _check_ends(self) -> None:
        """Raise a `SamplerError` if a source with "repeat" ends, or if no source ends and `on_exhausted` is not "repeat"."""
        ending = self._ending_sources()
        for name, on_exhausted in zip(self.sources, self._on_exhausted(), strict=True):
            if name in ending and on_exhausted == "repeat":
                problem = f"source {name!r} ends (it has epochs, or is a mixture that ends)"
                fix = "Leave its epochs out, or take on_exhausted='stop', 'renormalize' or 'fail'"
                raise SamplerError(f"{problem}, but on_exhausted='repeat' reads every source for ever. {fix}.")
        if self.on_exhausted != "repeat" and not ending:
            problem = f"on_exhausted={self.on_exhausted!r}: no source is ever exhausted"
            raise SamplerError(f"{problem}. Give a source `epochs` (`max_epochs` in a config).")

    def _ending_sources(self) -> list[str]:
        return [name for name, (_, rows) in self.sources.items() if rows.num_rows is not None]

    def parts(self) -> Iterator[tuple[str, SourceOrder | None, Mixture | None]]:
        """Yield (name, order, mixture) of each source: `mixture` is None for a `SourceOrder`, `order` is None for a mixture."""
        for name, (_, rows) in self.sources.items():
            yield (name, None, rows) if isinstance(rows, Mixture) else (name, rows, None)

    @property
    def changes(self) -> list[int]:
        """Steps at which weights change, in this mixture or in a mixture among its sources."""
        inner = [step for _, _, mixture in self.parts() if mixture is not None for step in mixture.changes]
        return [step for step, _ in self.schedule] + inner

    @property
    def num_instances(self) -> int:
        """Number of rows of all sources."""
        return sum(rows.num_instances for _, rows in self.sources.values())

    @property
    def num_rows(self) -> int | None:
        """Number of rows of the mixture. None if the mixture never ends, ends in a failure, or has a schedule.

        With a schedule, the number depends on the batch sizes, which only the sampler has.
        """
        if self.schedule or not self._ending_sources():
            return None
        return self.proportions(lambda step: 0).length  # without a schedule, the function is only called for step 0

    @property
    def data_key(self) -> str:
        """Text with all that decides the rows. Receipts hash it, so `on_exhausted` keeps its former name `when_dry` here."""
        sources = ", ".join(
            f"{name!r}: ({share}, {rows.data_key})"
            for share, (name, (_, rows)) in zip(self._shares(self._weights[0]), self.sources.items(), strict=True)
        )
        changes = [f"{step}: {list(map(str, self._shares(weights)))}" for step, weights in self.schedule]
        return f"Mixture({{{sources}}}, when_dry={self.on_exhausted!r}, schedule={{{', '.join(changes)}}})"

    def continued(self, starts: Mapping[str, tuple[int, int]], prefix: str = "") -> Mixture:
        """Return a copy of this mixture whose sources begin at `starts`.

        Args:
          starts: Pair (epoch, index) of a source's first row, by name of the source, such as "code/python" for source "python"
            of the mixture "code". A source that is not in `starts` begins at (0, 0).
          prefix: Prefix of the names of this mixture's sources, such as "code/".
        """
        sources: dict[str, tuple[Weight, SourceOrder | Mixture]] = {}
        for name, (weight, rows) in self.sources.items():
            if isinstance(rows, Mixture):
                sources[name] = weight, rows.continued(starts, f"{prefix}{name}/")
            else:
                sources[name] = weight, dataclasses.replace(rows, start=starts.get(prefix + name, (0, 0)))
        return dataclasses.replace(self, sources=sources)

    def reweighted(self, changes: Sequence[tuple[int, Mapping[str, Weight]]]) -> Mixture:
        """Return a copy of this mixture, with other weights for some sources.

        Args:
          changes: Pairs (step, weights by name), with ascending steps. A weight holds from its step to the next step at which
            `changes` or the schedule gives the source another weight.

        Raises:
          SamplerError: `changes` has a name that is not a source of the mixture.
        """
        for _, others in changes:
            if unknown := others.keys() - self.sources.keys():
                problem = f"reweight {', '.join(sorted(unknown))}: the mixture has {', '.join(self.sources)}"
                raise SamplerError(f"{problem}. Fix the names.")
        weights: dict[str, Weight] = {}  # weights at `step`, with the changes
        planned: Mapping[str, Weight] = {}  # weights at `step`, without the changes
        entries: dict[int, dict[str, Weight]] = {}
        for step in sorted({*self._weights, *(step for step, _ in changes)}):
            before, planned = planned, self._weights.get(step, planned)
            weights |= {name: weight for name, weight in planned.items() if weight != before.get(name)}
            for change_step, others in changes:
                if change_step == step:
                    weights |= others
            entries[step] = dict(weights)
        first_weights = entries.pop(0)
        sources = {name: (first_weights[name], rows) for name, (_, rows) in self.sources.items()}
        return dataclasses.replace(self, sources=sources, schedule=tuple(entries.items()))

    def proportions(self, rows_before: Callable[[int], int]) -> Proportions:
        """Return how the sources divide the rows. `rows_before(step)` is the number of the mixture's rows before a step."""
        changes = {rows_before(step): self._shares(weights) for step, weights in self._weights.items()}
        limits = [rows.num_rows for _, rows in self.sources.values()]
        if (most := max(0, *changes, *filter(None, limits))) > MOST_ROWS:
            problem = f"a mixture counts its rows up to 2^62; found {most}"
            raise SamplerError(f"{problem}. Take fewer epochs, or earlier steps in the schedule.")
        # without a value of `on_exhausted`, no source ends; all limits are then None
        return Proportions(list(changes.items()), limits, self._on_exhausted() if self._ending_sources() else ())
