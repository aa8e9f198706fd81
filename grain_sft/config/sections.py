"""Keys of each section of a config, and the JSON Schema of configs."""

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from grain_sft.config.amendments import AMENDMENTS
from grain_sft.corpus import open_corpus
from grain_sft.layout import LAYOUTS
from grain_sft.options import Option, Options, Section, options_of, struct_of
from grain_sft.pipeline import OBSERVERS
from grain_sft.registry import Registry
from grain_sft.sampling import ORDERS, CurriculumSampler, IndexSampler, OnExhausted, Order
from grain_sft.storage import RemoteOptions
from grain_sft.transforms import TRANSFORMS


class Top(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a config next to the sections `corpus`, `layout` and `sampler`.

    Args:
      inherits: Path of another config whose keys this config inherits. Sections are merged key by key; a list replaces
        the inherited list. `null` removes an inherited `schedule`, `on_exhausted` or `transforms`.
      transforms: Transforms of each batch, in order. An item is a name, or `{name: {option: value}}`; the name may be
        `package.module:Name`. Without this key, layouts of kinds `pairs` and `megatron_gpt` take the transforms that their
        options need.
      observers: Objects whose methods are called at events of the run, for example when the trainer gets a batch. An item is a
        name, or `{name: {option: value}}`; the name may be `package.module:Name`. Metrics and the watchdog observe every run
        without being named.
      audit: Local path of the audit log, without a suffix: `logs/audit` makes `logs/audit.log` and `logs/audit.jsonl`. The log
        records which data the run read. The first host writes it.
      amendments: Changes of the run, in the order in which they were made. See [amendments](#amendments).
      stages: Consecutive parts of the run, each with its own sequence length, batch size, mixture or layout. See
        [stages](#stages).
    """

    inherits: str | None = None
    transforms: tuple[Any, ...] | None = ("shift_targets",)
    observers: tuple[Any, ...] = ()
    audit: str | None = None
    amendments: tuple[Any, ...] = ()
    stages: tuple[dict[str, Any], ...] = ()


class CorpusSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `corpus` besides the arguments of `open_corpus`.

    Args:
      path: Path or URL of the tokens: a directory, a glob, a mix file, a saved index, a token file, a list of these, or a blend
        of Megatron's prefixes (`[0.3, a, 0.7, b]`). A relative path starts at the folder of the config. If nothing exists
        there, the path starts at the working directory. Required without `mixture`.
      mixture: Several corpora with weights, by name. See [sources](#sources-of-a-mixture).
      remote: How files in a bucket are read; see [corpora in a bucket](cloud.md).
      pad_token_id: Id of the token that fills rows; `null` means the EOS token of the corpus. Default: the corpus's own
        padding id, else its EOS token, else 0.
    """

    path: str | list[str | float] | None = None
    mixture: dict[str, Any] | None = None
    remote: RemoteOptions | None = None
    pad_token_id: int | None = None


class LayoutSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `layout` besides the arguments of the layout's class.

    Args:
      kind: How rows are made: `windows` are consecutive tokens, `padded` is one document a row, `packed` is several, `pairs`
        is one preference pair, `materialized` reads rows that `grain-sft pack --materialize` wrote, `megatron_gpt` makes rows
        of Megatron-LM, `olmo_vsl` those of OLMo-core's variable-length dataset. `package.module:Name` is a layout of yours.
      sequence_length: Number of tokens in a row. In kind `olmo_vsl`, number of tokens in the longest rows; in `pairs`, in a
        prompt and one response; in `megatron_gpt`, in a row of `inputs`, which may be one token shorter than the layout's row.
    """

    kind: Annotated[str, LAYOUTS]
    sequence_length: Annotated[int, msgspec.Meta(ge=1)]


class ScheduleEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry of `sampler.schedule`.

    Args:
      step: Step from which the entry applies, 1 or more. Entries are in order of their steps.
      global_batch_size: Rows of a step, of all hosts together, from `step` on.
      global_batch_tokens: Tokens of a step from `step` on, in place of `global_batch_size`.
      weights: Weights of a mixture's sources from `step` on, by name. Sources that are not named keep their weights.
    """

    step: Annotated[int, msgspec.Meta(ge=1)]
    global_batch_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    global_batch_tokens: int | None = None
    weights: dict[str, float | str] | None = None


class SamplerSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `sampler` besides the arguments of `IndexSampler`.

    Args:
      global_batch_size: Rows of a step, of all hosts together. This or `global_batch_tokens` is required.
      global_batch_tokens: Tokens of a step, of all hosts together: a multiple of `layout.sequence_length`.
      schedule: Changes of the batch size or of weights, each from a step on. See [schedules](#schedules).
      on_exhausted: What a mixture does when a source has no rows left: `repeat` the source, `stop`, `renormalize` the other
        weights, or `fail`.
    """

    global_batch_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    global_batch_tokens: int | None = None
    schedule: tuple[ScheduleEntry, ...] | None = ()
    on_exhausted: OnExhausted | None = "repeat"


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that a source of `corpus.mixture` may have besides the keys of `corpus`.

    Args:
      weight: Share of the rows, relative to the other weights: a number, or text such as `1/3`.
      layout: Keys of `layout` that differ for this source.
      sampler: Keys of `sampler` that differ for this source. `order`, `seed`, `shuffle` and `epochs` may differ.
      max_epochs: Number of epochs after which the source has no rows left; the same as `epochs` in the source's `sampler`.
        Without either key, the source never ends.
      on_exhausted: What happens after `max_epochs`: `stop`, `renormalize` or `fail`. Default: the value of
        `sampler.on_exhausted`. In a source that is a mixture itself, this key replaces `sampler.on_exhausted` for the inner
        sources: it may also be `repeat`, which is its default there.
      schedule: Changes of weights, only in a source that is a mixture itself. Entries are as in `sampler.schedule`, but without
        batch sizes.
    """

    weight: float | str
    layout: dict[str, Any] = {}
    sampler: dict[str, Any] = {}
    max_epochs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    on_exhausted: OnExhausted | None = None
    schedule: tuple[ScheduleEntry, ...] | None = ()


class StageSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a stage.

    Args:
      steps: Number of steps of the stage. A stage states `steps` or `tokens`; the last stage may omit both.
      tokens: Number of tokens of the stage, rounded up to whole steps. Each token of a row counts, padding included.
      corpus: Keys of `corpus` that differ in the stage. A stage that gives a `path` inherits no key of the config's
        `corpus`. If both the stage and the config give a `mixture`, the two are merged key by key. If only the stage gives a
        `mixture`, it inherits no key of the config's `corpus`.
      layout: Keys of `layout` that differ in the stage.
      sampler: Keys of `sampler` that differ in the stage. The steps of `schedule` count from the first step of the stage.
      transforms: Transforms of the stage, in place of all transforms of the config. Default: those of the config.
    """

    steps: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    corpus: dict[str, Any] = {}
    layout: dict[str, Any] = {}
    sampler: dict[str, Any] = {}
    transforms: tuple[Any, ...] | None = None


def _without(options: Options, *names: str) -> dict[str, Option]:
    return {name: option for name, option in options.items() if name not in names}


TOP: Options = options_of(Top)
_CORPUS_KEYS = options_of(CorpusSection)
_OPEN_CORPUS_KEYS = _without(options_of(open_corpus), "where", *_CORPUS_KEYS)  # the key for `where` is `path`
CORPUS: Options = {**_CORPUS_KEYS, **_OPEN_CORPUS_KEYS}
_NOT_KEYS = ("num_instances", "buckets", "host", "costs", "chunk_size", "start", "cache_dir")
INDEX_SAMPLER: Options = _without(options_of(IndexSampler), *_NOT_KEYS)
CURRICULUM_SAMPLER: Options = _without(options_of(CurriculumSampler), *_NOT_KEYS)
SAMPLER: Options = {**INDEX_SAMPLER, **_without(CURRICULUM_SAMPLER, *INDEX_SAMPLER), **options_of(SamplerSection)}
SOURCE: Options = {**CORPUS, **options_of(Source)}
STAGE: Options = options_of(StageSection)
SOURCE_SAMPLER: Options = {name: SAMPLER[name] for name in ("order", "seed", "shuffle", "epochs")}
LAYOUT: Options = options_of(LayoutSection)
"""Keys that every kind of layout has."""

SECTIONS = ("corpus", "layout", "sampler")

SIZES = ("global_batch_size", "global_batch_tokens")
"""Keys for the size of a batch."""

_IMPORTED_NAME = {"type": "string", "pattern": "^[\\w.]+:\\w+$"}


def order_of(sampler: Section) -> Order:
    """Return the entry of `ORDERS` that a section `sampler` names, or the default order."""
    return ORDERS[sampler.get("order", INDEX_SAMPLER["order"].default)]


def layout_options(kind: str) -> Options:
    """Return the keys of this kind of layout besides `LAYOUT`."""
    return _without(options_of(LAYOUTS[kind]), "corpus", "sequence_length", "cache_dir")


def all_layout_options() -> Options:
    """Return the keys of layouts of all kinds."""
    return {**LAYOUT, **{name: option for kind in LAYOUTS for name, option in layout_options(kind).items()}}


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a config. No section or stage has required keys, because a config may inherit them."""
    sections = {"Corpus": CORPUS, "Sampler": SAMPLER, "Source": SOURCE, "Config": TOP, "Stage": STAGE}
    sections |= {f"Layout{kind.title()}": {**LAYOUT, **layout_options(kind)} for kind in LAYOUTS}
    definitions: dict[str, Any] = {}
    _add_schemas(sections, definitions)
    for name in sections:
        definitions[name].pop("required", None)
    schema = definitions.pop("Config")
    for name in ("Corpus", "Source"):
        mixture = definitions[name]["properties"]["mixture"]
        mixture |= {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/Source"}}
        mixture.pop("anyOf", None)  # the schema of `dict | None`
    for kind in LAYOUTS:
        definitions[f"Layout{kind.title()}"]["properties"]["kind"] = {"const": kind}
    definitions["LayoutOther"] = {"type": "object", "properties": {"kind": _IMPORTED_NAME}}
    closed = {"type": "object", "additionalProperties": False}
    kinds = _add_schemas(AMENDMENTS, definitions).items()
    amendments = [{**closed, "properties": {kind: keys}, "required": [kind]} for kind, keys in kinds]
    layouts = [{"$ref": f"#/$defs/Layout{kind.title()}"} for kind in (*LAYOUTS, "other")]
    schema["properties"] |= {
        "corpus": {"$ref": "#/$defs/Corpus"},
        "layout": {"anyOf": layouts},
        "sampler": {"$ref": "#/$defs/Sampler"},
        "transforms": {"type": ["array", "null"], "items": _entry_schema(TRANSFORMS, definitions)},
        "observers": {"type": "array", "items": _entry_schema(OBSERVERS, definitions)},
        "amendments": {"type": "array", "items": {"anyOf": amendments}},
        "stages": {"type": "array", "items": {"$ref": "#/$defs/Stage"}},
    }
    definitions["Stage"]["properties"] |= {name: schema["properties"][name] for name in (*SECTIONS, "transforms")}
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Config of grain_sft"}
    return {**schema, **title, "$defs": definitions}


def _add_schemas(options: Mapping[str, Options], definitions: dict[str, Any]) -> dict[str, Any]:
    """Add to `definitions` the schema of each object in `options`. Return references to the schemas, by name."""
    structs = [struct_of(name, keys) for name, keys in options.items()]
    references, added = msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")
    for definition in added.values():  # Python before 3.13 keeps the indentation of docstrings
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    definitions |= added
    return dict(zip(options, references, strict=True))


def _entry_schema(table: Registry[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an entry of `transforms` or `observers`: a name, or a name with its options."""
    named = _add_schemas({name: options_of(table[name]) for name in table}, definitions)
    with_options = {"type": "object", "properties": named, "maxProperties": 1}
    with_options |= {"patternProperties": {":": {}}, "additionalProperties": False}  # ":" is in `package.module:Name`
    return {"anyOf": [{"enum": list(table)}, _IMPORTED_NAME, with_options]}
