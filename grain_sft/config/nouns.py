"""The nouns that validated sections of a config describe."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from grain_sft.config.reading import overlay
from grain_sft.config.sections import CORPUS, SOURCE
from grain_sft.corpus import Corpus, check_tokenizer, open_corpus
from grain_sft.errors import ConfigError
from grain_sft.layout import ALGORITHMS, LAYOUTS
from grain_sft.options import check, check_value, options_of
from grain_sft.registry import Registry
from grain_sft.sampling import ORDERS, Host, Mixture, MixtureSampler, SourceOrder
from grain_sft.source import MixtureSource, NpyDataSource

Section = Mapping[str, Any]

_OF_SOURCES = {*SOURCE} - {*CORPUS} | {"mixture"}


def make_corpus(section: Section, where: str) -> Corpus:
    """Return the corpus of a section."""
    options = {key: value for key, value in section.items() if key not in ("path", "pad_token_id")}
    corpus = open_corpus(section["path"], **options)
    if "tokenizer" in options:
        path = os.path.join(os.path.dirname(where), options["tokenizer"])
        if os.path.isfile(where) and os.path.exists(path):  # a path that starts at the config's folder
            check_tokenizer(corpus, path)
    if "pad_token_id" not in section:
        return corpus
    pad = corpus.eos_token_id if section["pad_token_id"] is None else section["pad_token_id"]
    if pad is None:
        raise ConfigError(
            f"{where}: corpus.pad_token_id is null, which is the id of the token that ends a document, and the corpus "
            "does not state it. Give corpus.eos_token_id, or the pad id itself."
        )
    return dataclasses.replace(corpus, pad_token_id=pad)


def make_source(corpus: Corpus, layout: Section) -> NpyDataSource:
    """Return the source of a section `layout`."""
    options = {key: value for key, value in layout.items() if key != "kind"}
    return NpyDataSource(LAYOUTS[layout["kind"]](corpus, **options))


def make_entry(item: object, table: Registry[Any], where: str) -> Any:
    """Return the object of a table that a config gives as `name` or as `{name: {option: value}}`."""
    name: object = item
    options: Any = {}
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, options),) = item.items()
        options = {} if options is None else options
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise ConfigError(f"{where}: {item!r}; expected a name, or one name with its options.")
    check_value(name, Annotated[str, table], where)
    entry = table[name]
    check(options, options_of(entry), f"{where}.{name}")
    return entry(**options)


def make_mixture(
    corpus: Section, layout: Section, sampler: Section, where: str, host: Host
) -> tuple[MixtureSource, MixtureSampler]:
    """Return the source and the sampler of a mixture.

    Keys of `corpus` besides `mixture` are defaults of every source, and so are `layout`'s, and `order`, `seed` and `shuffle`
    of `sampler`.
    """
    orders = {key: sampler[key] for key in ("order", "seed", "shuffle") if key in sampler}
    sources: dict[str, NpyDataSource] = {}

    def mixture_of(section: Section, defaults: Section, prefix: str) -> Mixture:
        made = {
            name: (keys["weight"], rows_of(keys, defaults, prefix + name)) for name, keys in section["mixture"].items()
        }
        changes = weights_of(section.get("schedule", []), {name: weight for name, (weight, _) in made.items()})
        return Mixture(made, section.get("on_exhausted", "repeat"), tuple(changes))

    def rows_of(section: Section, defaults: Section, name: str) -> SourceOrder | Mixture:
        keys = {**defaults, **{key: value for key, value in section.items() if key not in _OF_SOURCES}}
        if section.get("mixture") is not None:
            return mixture_of(section, keys, f"{name}/")
        own = overlay({"layout": dict(layout)}, {"layout": section.get("layout", {})})["layout"]
        order = {**orders, **section.get("sampler", {})}
        _check_source(own, order, f"{where}: source {name!r}")
        source = sources[name] = make_source(make_corpus(keys, where), own)
        return SourceOrder(len(source), **order)

    defaults = {key: value for key, value in corpus.items() if key != "mixture"}
    mixture = mixture_of({**sampler, "mixture": corpus["mixture"]}, defaults, "")
    return MixtureSource(sources), MixtureSampler(
        mixture,
        global_batch_size=sampler["global_batch_size"],
        host=host,
        last_batch=sampler.get("last_batch", "drop"),
        schedule=sizes_of(sampler.get("schedule", []), layout["sequence_length"]),
    )


def _check_source(layout: Section, order: Section, where: str) -> None:
    """Refuse layouts that make batches, or that order rows themselves and are given an order."""
    name = layout.get("algorithm")
    if name is None:
        return
    if ALGORITHMS[name].whole_batches:
        raise ConfigError(
            f"{where}: algorithm {name} makes whole batches, and those of a mixture hold rows of all sources. Take "
            "another algorithm."
        )
    if ALGORITHMS[name].packs_per_epoch and not ORDERS[order.get("order", "shuffle")].sequential:
        raise ConfigError(
            f"{where}: algorithm {name} orders the rows of all its epochs (layout.epochs) itself. Give the source "
            "sampler: {order: sequential}."
        )


def follow_packing(layout: dict[str, Any], sampler: dict[str, Any], where: str) -> None:
    """Fit the sections of an algorithm that packs each epoch anew. Its rows are numbered through its epochs, and read as
    they are numbered. Where the sampler's order is the one that the algorithm follows, the layout takes its seed and epochs
    over. Where whole batches are packed, the layout takes over their size. Other keys are errors."""
    name = layout.get("algorithm")
    if name is None or not ALGORITHMS[name].packs_per_epoch:
        return
    algorithm = ALGORITHMS[name]
    follows = algorithm.order is not None and sampler.get("order") == algorithm.order
    if algorithm.whole_batches and "schedule" in sampler:
        raise ConfigError(
            f"{where}: sampler.schedule: algorithm {name} makes whole batches of one size beforehand. Take it out."
        )
    if not follows and "seed" not in layout:
        raise ConfigError(f"{where}: layout lacks the key 'seed': algorithm {name} packs each epoch anew by it.")
    as_numbered = ORDERS[sampler.get("order", "shuffle")].sequential
    expected = {"epochs": 1} if as_numbered else {"order": "sequential"}
    for key, right in ({"last_batch": "drop", "shuffle": True} if follows else expected).items():
        if sampler.get(key, right if follows else None) != right:
            raise ConfigError(
                f"{where}: sampler.{key} is {sampler.get(key)!r}; with layout.algorithm {name}, which orders the rows "
                f"of all its epochs (layout.epochs) itself, expected {right!r}."
            )
    if follows:
        _take_over_order(layout, sampler, name, where)
    rows = sampler["global_batch_size"]
    if algorithm.whole_batches and layout.setdefault("batch_rows", rows) != rows:
        raise ConfigError(
            f"{where}: layout.batch_rows is {layout['batch_rows']}, but the sampler's global batch has {rows} rows; "
            f"{name} makes whole batches, so these are one number. Leave layout.batch_rows out."
        )


def _take_over_order(layout: dict[str, Any], sampler: dict[str, Any], algorithm: str, where: str) -> None:
    if "epochs" not in sampler and "epochs" not in layout:
        raise ConfigError(
            f"{where}: sampler lacks the key 'epochs': layout.algorithm {algorithm} makes the rows of each epoch beforehand."
        )
    for key in ("seed", "epochs"):
        value = sampler.get(key)
        if value is not None and layout.setdefault(key, value) != value:
            raise ConfigError(f"{where}: layout.{key} is {layout[key]}, but sampler.{key} is {value}. Leave one out.")
    sampler.update(order="sequential", epochs=1)


def sizes_of(entries: Iterable[Section], length: int) -> list[tuple[int, int]]:
    """Return the batches of a schedule, in rows, by step."""
    found = []
    for entry in entries:
        tokens = entry.get("global_batch_tokens")
        rows = entry.get("global_batch_size") if tokens is None else tokens // length
        if rows is not None:
            found.append((entry["step"], rows))
    return found


def weights_of(entries: Iterable[Section], weights: Section) -> list[tuple[int, Section]]:
    """Return the weights of a schedule, of all sources, by step. One that an entry does not name stays."""
    found: list[tuple[int, Section]] = []
    for entry in entries:
        if entry.get("weights") is not None:
            weights = {**weights, **entry["weights"]}
            found.append((entry["step"], weights))
    return found
