"""Data sources, samplers and transforms, made from the validated sections of a config."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from grain_sft.config.reading import overlay_layout
from grain_sft.config.sections import CORPUS, CURRICULUM_SAMPLER, INDEX_SAMPLER, SECTIONS, SOURCE, order_of
from grain_sft.corpus import Corpus, open_corpus
from grain_sft.errors import ConfigError, GrainSftError, LayoutError
from grain_sft.layout import ALGORITHMS, LAYOUTS, Layout
from grain_sft.options import Section, check, check_value, options_of
from grain_sft.registry import Registry, name_of
from grain_sft.sampling import CurriculumSampler, Host, IndexSampler, Mixture, MixtureSampler, Sampler, SourceOrder
from grain_sft.source import MixtureSource, NpyDataSource
from grain_sft.transforms import TRANSFORMS

Sizes = list[tuple[int, int]]
"""Changes of the batch size: pairs (step from which the size applies, number of rows)."""

_NOT_OF_CORPUS = ({*SOURCE} - {*CORPUS}) | {"mixture"}
"""Keys of a mixture's source that do not describe the source's corpus, such as `weight`."""


class PartsMaker:
    """Maker of the data sources, samplers and transforms of the config `where`. Stages share equal corpora and data sources."""

    def __init__(self, where: str, host: Host | None) -> None:
        self._where, self._host = where, host  # `host` None means this process of JAX
        # what was opened and made before, by the text of its sections
        self._corpora: dict[str, Corpus] = {}
        self._sources: dict[str, NpyDataSource] = {}

    def make(self, sections: Section) -> tuple[NpyDataSource | MixtureSource, Sampler, list[Any]]:
        """Return the source, the sampler and the transforms of a run or a stage with this validated config."""
        corpus, layout, sampler = (dict(sections[name]) for name in SECTIONS)
        sampler["global_batch_size"] = rows_of_batch(sampler, layout["sequence_length"])
        sampler.pop("global_batch_tokens", None)
        schedule = sizes_of(sampler.get("schedule", ()), layout["sequence_length"])
        where = f"{self._where}: transforms"
        # opening the corpus may take long, so a wrong transform raises its error first
        transforms = [make_entry(item, TRANSFORMS, where) for item in sections.get("transforms", ())]
        make = self._single if corpus.get("mixture") is None else self._mixture
        source, row_sampler = make(corpus, layout, sampler, schedule)
        if "transforms" not in sections:
            _check_defaults(source.layout, self._where)
            transforms = [make_entry(item, TRANSFORMS, where) for item in source.layout.transforms]
        _check_needed(transforms, source.layout, self._where)
        return source, row_sampler, transforms

    def _corpus(self, section: Section) -> Corpus:
        """Return the corpus of a section, which is opened once."""
        key = repr(sorted(section.items()))
        if key not in self._corpora:
            self._corpora[key] = make_corpus(section, self._where)
        return self._corpora[key]

    def _source(self, corpus: Section, layout: Section) -> NpyDataSource:
        """Return the data source of a corpus (without a mixture) and a layout, which is made once."""
        key = repr([sorted(corpus.items()), sorted(layout.items())])
        if key not in self._sources:
            options = {name: value for name, value in layout.items() if name != "kind"}
            opened = self._corpus(corpus)
            with naming(self._where, f"{self._where}: layout"):
                source = NpyDataSource(LAYOUTS.make(layout["kind"], opened, **options))
                length = source.layout.sequence_length
                # Only a layout with its own default transforms, such as `megatron_gpt`, may have longer rows, which they cut.
                if length != options["sequence_length"] and tuple(source.layout.transforms) == Layout.transforms:
                    found = f"{name_of(type(source.layout))}: sequence_length={length}, not that of the config"
                    raise LayoutError(f"{found}. Set it to the argument, or state `transforms` that cut the rows.")
                self._sources[key] = source
        return self._sources[key]

    def _single(
        self, corpus: Section, layout: dict[str, Any], sampler: dict[str, Any], schedule: Sizes
    ) -> tuple[NpyDataSource, Sampler]:
        """Return the source and the sampler of a config without a mixture."""
        _adapt_to_packing(layout, sampler, self._where)
        source = self._source(corpus, layout)
        host = Host.from_jax() if self._host is None else self._host
        several_lengths = bool(source.layout.row_lengths)
        _check_sampler(sampler, several_lengths, self._where)
        if several_lengths:
            # pairs (length of rows, number of rows of this length)
            buckets = zip(source.layout.row_lengths, source.layout.row_counts, strict=True)
            return source, CurriculumSampler(buckets, host=host, **sampler)
        # `orders_rows`: the layout numbers the rows in the order in which they are to be read
        if source.layout.orders_rows and "order" not in sampler:
            sampler = {"order": "sequential", "epochs": 1} | sampler
        costs = source.layout.row_costs if order_of(sampler).by_cost else None
        sampler |= {"host": host, "schedule": schedule, "chunk_size": source.layout.chunk_size}
        return source, IndexSampler(len(source), costs=costs, **sampler)

    def _mixture(
        self, corpus: Section, layout: Section, sampler: Section, schedule: Sizes
    ) -> tuple[MixtureSource, MixtureSampler]:
        """Return the source and the sampler of a config with a mixture."""
        _check_sampler(sampler, False, self._where)
        orders = {key: sampler[key] for key in ("order", "seed", "shuffle") if key in sampler}  # sources inherit these
        sources: dict[str, NpyDataSource] = {}

        def mixture_of(section: Section, defaults: Section, prefix: str) -> Mixture:
            """Return the mixture of a section: the sampler with `mixture` added, or a source that is a mixture.

            `defaults` are keys of `corpus` that its sources inherit. In `sources`, their names begin with `prefix`: "web/".
            """
            named = section["mixture"].items()
            members = {name: (keys["weight"], open_source(keys, defaults, prefix + name)) for name, keys in named}
            weights = {name: keys["weight"] for name, keys in named}
            changes = []
            for entry in section.get("schedule", []):
                if entry.get("weights") is not None:
                    weights = {**weights, **entry["weights"]}  # the other sources keep their weights
                    changes.append((entry["step"], weights))
            return Mixture(members, section.get("on_exhausted") or "repeat", tuple(changes))

        def open_source(section: Section, defaults: Section, name: str) -> SourceOrder | Mixture:
            """Return the mixture of a section that has one. Otherwise, add its source to `sources` and return its order."""
            keys = {**defaults, **{key: value for key, value in section.items() if key not in _NOT_OF_CORPUS}}
            if section.get("mixture") is not None:
                return mixture_of(section, keys, f"{name}/")
            own_layout = overlay_layout(layout, section.get("layout", {}))
            order = {**orders, **section.get("sampler", {}), "on_exhausted": section.get("on_exhausted")}
            if section.get("max_epochs") is not None:
                order["epochs"] = section["max_epochs"]
            with naming(self._where, f"{self._where}: source {name!r}"):
                _check_source(own_layout, order, self._where)
                source = sources[name] = self._source(keys, own_layout)
                if source.layout.orders_rows and "order" not in section.get("sampler", {}):
                    order["order"] = "sequential"
                return SourceOrder(len(source), chunk_size=source.layout.chunk_size, **order)

        defaults = {key: value for key, value in corpus.items() if key != "mixture"}
        mixture = mixture_of({**sampler, "mixture": corpus["mixture"]}, defaults, "")
        options = {name: sampler[name] for name in ("global_batch_size", "last_batch") if name in sampler}
        host = Host.from_jax() if self._host is None else self._host
        return MixtureSource(sources), MixtureSampler(mixture, host=host, schedule=schedule, **options)


def make_corpus(section: Section, where: str) -> Corpus:
    """Return the corpus that a section `corpus` describes, in the config `where`."""
    options = {key: value for key, value in section.items() if key not in ("path", "pad_token_id", "mixture")}
    tokenizer = options.get("tokenizer")
    if tokenizer is not None:
        # the paths in a mix file of OLMo contain "{TOKENIZER}"
        name = getattr(tokenizer, "name", tokenizer)  # as the config states it, without the config's folder
        options["path_remap"] = {"{TOKENIZER}": name, **(options.get("path_remap") or {})}
    corpus = open_corpus(section["path"], **options)
    if "pad_token_id" not in section:
        return corpus
    pad_token_id = corpus.eos_token_id if section["pad_token_id"] is None else section["pad_token_id"]
    if pad_token_id is None:
        found = "corpus.pad_token_id is null, which means the EOS id, but the corpus has none"
        raise ConfigError(f"{where}: {found}. Give corpus.eos_token_id, or the padding id itself.")
    return dataclasses.replace(corpus, pad_token_id=pad_token_id)


@contextlib.contextmanager
def naming(where: str, section: str | None = None) -> Iterator[None]:
    """Prefix errors in the context with `section`, such as "a.yaml: layout". None means `where`, the config's name."""
    prefix = section or where
    try:
        yield
    except GrainSftError as error:
        prefixed_error = None
        if not str(error).startswith(prefix):
            with contextlib.suppress(TypeError):  # an error class from outside may take other arguments
                prefixed_error = type(error)(f"{prefix}: {str(error).removeprefix(f'{where}: ')}")
        if prefixed_error is None:
            raise
        raise prefixed_error from error


def make_entry(item: object, table: Registry[Any], where: str) -> Any:
    """Return the object that `item` describes: the name of an entry of `table`, or `{name: {option: value}}`."""
    name, options = item, None
    if isinstance(item, Mapping) and len(item) == 1:
        [(name, options)] = item.items()
    if not isinstance(name, str) or not isinstance(options, Mapping | None):
        raise ConfigError(f"{where}: {item!r}; expected a name, or one name with its options, {{name: {{option: value}}}}.")
    check_value(name, Annotated[str, table], where)
    check(options or {}, options_of(table[name]), f"{where}.{name}")
    with naming(where):
        return table.make(name, **(options or {}))


def _check_defaults(layout: Layout, where: str) -> None:
    """Refuse a mixture whose layouts have different default transforms."""
    transforms = {name: list(part.transforms) for name, part in layout.parts.items()}
    if len({repr(each) for each in transforms.values()}) > 1:
        listed = "; ".join(f"{name}: {each}" for name, each in transforms.items())
        problem = f"lacks the key 'transforms', and the layouts of its sources have different defaults ({listed})"
        raise ConfigError(f"{where} {problem}. Give the transforms of the mixture.")


def _check_needed(transforms: Iterable[Any], layout: Layout, where: str) -> None:
    """Refuse a config whose key `transforms` lacks a transform that the layout needs for its options."""
    kinds = set(map(type, transforms))
    for source, part in layout.parts.items():
        for entry in part.needed_transforms:
            if kinds.isdisjoint(TRANSFORMS[name] for name in entry):
                owner = f"the layout of source {source!r}" if source else "the layout"
                found = f"options of {owner} need {dict(entry)}"
                raise ConfigError(f"{where}: {found}, which the key 'transforms' lacks. Add it, or remove the options.")


def _check_sampler(sampler: Section, several_lengths: bool, where: str) -> None:
    """Refuse keys for rows of several lengths in a layout of one length, and the reverse."""
    if several_lengths:
        allowed, refused = CURRICULUM_SAMPLER, INDEX_SAMPLER
        reason = "rows of one length, but the rows of this layout have several"
    else:
        allowed, refused = INDEX_SAMPLER, CURRICULUM_SAMPLER
        reason = "rows of several lengths (olmo_vsl), but the rows of this layout have one"
    for key in sampler:
        if key in refused and key not in allowed:
            raise ConfigError(f"{where}: sampler.{key} is for {reason}. Take it out.")


def _check_source(layout: Section, order: Section, where: str) -> None:
    """Refuse a packing algorithm that a source of a mixture can't have.

    An algorithm that packs per epoch orders the rows of all epochs when the layout is made, so they are read sequentially.
    """
    name = layout.get("algorithm")
    if name is None:
        return
    where = f"{where}: algorithm {name}"
    if ALGORITHMS[name].whole_batches:
        problem = "makes whole batches, but the batches of a mixture hold rows of all its sources"
        raise ConfigError(f"{where} {problem}. Choose another algorithm.")
    if ALGORITHMS[name].packs_per_epoch and "seed" not in layout:
        raise ConfigError(f"{where} shuffles by the key 'seed', which its layout lacks. Give layout.seed.")
    if ALGORITHMS[name].packs_per_epoch and not order_of(order).sequential:
        hint = "Give this source the key sampler: {order: sequential}"
        raise ConfigError(f"{where} orders the rows of all its epochs (layout.epochs) itself. {hint}.")


def _adapt_to_packing(layout: dict[str, Any], sampler: dict[str, Any], where: str) -> None:
    """Adapt `layout` and `sampler`, in place, to a packing algorithm that packs all epochs when the layout is made.

    The sampler must then read each row once, in the order of the row numbers. An algorithm may replace an order: `multipack`
    packs and shuffles as OpenChat does, so it replaces the order `openchat`. If the config states this order, `seed` and
    `epochs` of the sampler are copied to `layout`, and the sampler becomes sequential with one epoch. Otherwise, the config
    must state a sequential sampler with one epoch, and `layout.seed`.
    """
    name = layout.get("algorithm")
    if name is None or not ALGORITHMS[name].packs_per_epoch:
        return
    algorithm = ALGORITHMS[name]
    if algorithm.whole_batches and "schedule" in sampler:
        why = f"algorithm {name} makes whole batches of one size beforehand"
        raise ConfigError(f"{where}: sampler.schedule: {why}. Take it out.")
    if algorithm.order is not None and sampler.get("order") == algorithm.order:
        # the packing replaces the order, and supports only these values
        _expect(sampler, "last_batch", "drop", name, where)
        _expect(sampler, "shuffle", True, name, where)
        if sampler.get("epochs") is None and "epochs" not in layout:
            why = f"layout.algorithm {name} makes the rows of each epoch beforehand"
            raise ConfigError(f"{where}: sampler.epochs is missing or null: {why}. Give the number of epochs.")
        for key in ("seed", "epochs"):
            value = sampler.get(key)
            if value is not None and layout.setdefault(key, value) != value:
                found = f"layout.{key} is {layout[key]}, but sampler.{key} is {value}"
                raise ConfigError(f"{where}: {found}. Leave one of them out.")
        sampler.update(order="sequential", epochs=1)
    elif "seed" not in layout:
        raise ConfigError(f"{where}: layout lacks the key 'seed': algorithm {name} shuffles by it. Give layout.seed.")
    elif order_of(sampler).sequential:
        _expect(sampler, "epochs", 1, name, where)
    else:
        _expect(sampler, "order", "sequential", name, where)
    rows = sampler["global_batch_size"]
    if algorithm.whole_batches and layout.setdefault("batch_rows", rows) != rows:
        found = f"layout.batch_rows is {layout['batch_rows']}, but the sampler's global batch has {rows} rows"
        raise ConfigError(f"{where}: {found}; {name} makes whole batches. Leave layout.batch_rows out.")


def _expect(sampler: Section, key: str, expected: object, algorithm: str, where: str) -> None:
    """Raise a ConfigError unless `sampler[key]`, or the default of this option, is `expected`."""
    if sampler.get(key, INDEX_SAMPLER[key].default) != expected:
        found = repr(sampler[key]) if key in sampler else "missing"
        why = f"layout.algorithm {algorithm} orders the rows of all its epochs (layout.epochs) itself"
        raise ConfigError(f"{where}: sampler.{key} is {found}; expected {expected!r}, because {why}.")


def sizes_of(entries: Iterable[Section], length: int) -> Sizes:
    """Return the changes of the batch size in a schedule, the list `entries`. `length` is the number of tokens of a row."""
    sizes = ((entry["step"], rows_of_batch(entry, length)) for entry in entries)
    return [(step, rows) for step, rows in sizes if rows is not None]


def rows_of_batch(section: Section, length: int) -> int | None:
    """Return the number of rows of a batch, for rows of `length` tokens; None if a section states no batch size."""
    tokens = section.get("global_batch_tokens")
    return section.get("global_batch_size") if tokens is None else tokens // length
