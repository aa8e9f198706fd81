"""Mixtures of a config: `corpus.mixture`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grain_sft.config.corpora import make_corpus
from grain_sft.config.reading import overlay
from grain_sft.config.schedule import sizes_of, weights_of
from grain_sft.errors import ConfigError
from grain_sft.layout import LAYOUTS
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.sampling import Host, Mixture, MixtureSampler, SourceOrder
from grain_sft.source import MixtureSource, NpyDataSource

_OF_THE_SOURCE = ("weight", "layout", "sampler", "on_exhausted", "schedule", "mixture")
_OF_THE_WHOLE = ("mixture",)


def load_mixture(
    corpus: Mapping[str, Any], layout: Mapping[str, Any], sampler: Mapping[str, Any], where: str, host: Host
) -> tuple[MixtureSource, MixtureSampler]:
    """The source and the sampler of a validated mixture.

    Args:
      corpus: with `mixture`; its other keys are those of every source that does not say otherwise, and so are `layout`'s,
        and `order`, `seed` and `shuffle` of `sampler`.
      where: the config, for messages.

    Raises:
      ConfigError: sections that don't fit together.
      CorpusError, CorpusFileError, LayoutError, SamplerError: from what the config describes.
    """
    defaults = {key: value for key, value in corpus.items() if key not in _OF_THE_WHOLE}
    orders = {key: sampler[key] for key in ("order", "seed", "shuffle") if key in sampler}
    sources: dict[str, NpyDataSource] = {}
    schedule = sampler.get("schedule", [])
    stated = {"mixture": corpus["mixture"], "on_exhausted": sampler.get("on_exhausted", "repeat"), "schedule": schedule}
    mixture = _Sources(defaults, layout, orders, where, sources).mixture(stated, "")
    return MixtureSource(sources), MixtureSampler(
        mixture,
        global_batch_size=sampler["global_batch_size"],
        host=host,
        last_batch=sampler.get("last_batch", "drop"),
        schedule=sizes_of(schedule, layout["sequence_length"]),
    )


class _Sources:
    """Opens sources, the inner ones of mixtures too, and notes them by name."""

    def __init__(
        self,
        corpus: Mapping[str, Any],
        layout: Mapping[str, Any],
        orders: Mapping[str, Any],
        where: str,
        sources: dict[str, NpyDataSource],
    ) -> None:
        self._corpus, self._layout, self._orders, self._where = corpus, layout, orders, where
        self._sources = sources

    def mixture(self, stated: Mapping[str, Any], prefix: str) -> Mixture:
        """The mixture that `stated` describes; its sources are named with `prefix`."""
        made = {name: (keys["weight"], self._rows(keys, prefix + name)) for name, keys in stated["mixture"].items()}
        weights = {name: weight for name, (weight, _) in made.items()}
        changes = weights_of(stated.get("schedule", []), weights)
        return Mixture(made, stated.get("on_exhausted", "repeat"), tuple(changes))

    def _rows(self, keys: Mapping[str, Any], name: str) -> SourceOrder | Mixture:
        if "mixture" in keys:
            inner = {key: value for key, value in keys.items() if key not in _OF_THE_SOURCE}
            return _Sources({**self._corpus, **inner}, self._layout, self._orders, self._where, self._sources).mixture(
                keys, f"{name}/"
            )
        corpus = {key: value for key, value in {**self._corpus, **keys}.items() if key not in _OF_THE_SOURCE}
        layout = overlay({"layout": dict(self._layout)}, {"layout": keys.get("layout", {})})["layout"]
        order = {**self._orders, **keys.get("sampler", {})}
        self._check(layout, order, name)
        source = NpyDataSource(LAYOUTS[layout.pop("kind")](make_corpus(corpus, self._where), **layout))
        self._sources[name] = source
        return SourceOrder(len(source), **order)

    def _check(self, layout: Mapping[str, Any], order: Mapping[str, Any], name: str) -> None:
        """Refuse layouts that make batches, or that order rows themselves and are given an order."""
        algorithm = layout.get("algorithm")
        if algorithm is None:
            return
        entry = ALGORITHMS[algorithm]
        if entry.whole_batches:
            raise ConfigError(
                f"{self._where}: source {name!r}: algorithm {algorithm} makes whole batches, and those of a mixture hold "
                "rows of all sources. Take another algorithm."
            )
        if entry.packs_per_epoch and order.get("order") != "sequential":
            raise ConfigError(
                f"{self._where}: source {name!r}: algorithm {algorithm} orders the rows of all its epochs (layout.epochs) "
                "itself. Give the source sampler: {order: sequential}."
            )
