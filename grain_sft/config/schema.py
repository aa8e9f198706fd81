"""What a config may say: the keys of every section, and what each takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import grain

from grain_sft.corpus.open import FORMATS
from grain_sft.errors import ConfigError
from grain_sft.layout import Layout, MaterializedLayout, PackedLayout, PaddedLayout, WindowLayout
from grain_sft.layout.packing import ALGORITHMS, TIES
from grain_sft.sampling.orders import ORDERS
from grain_sft.sampling.sampler import LAST_BATCH
from grain_sft.transforms import DropLastPosition, NgramFilter, ShiftTargets, TrimToMultiple

LAYOUTS: dict[str, Callable[..., Layout]] = {
    "windows": WindowLayout,
    "padded": PaddedLayout,
    "packed": PackedLayout,
    "materialized": MaterializedLayout,
}
TRANSFORMS: dict[str, Callable[..., grain.transforms.Map]] = {
    "ngram_filter": NgramFilter,
    "shift_targets": ShiftTargets,
    "trim_to_multiple": TrimToMultiple,
    "drop_last_position": DropLastPosition,
}

Kind = type | tuple[type, ...] | tuple[str, ...]
_PATH: Kind = (str, list)
COUNT_OR_NONE: Kind = (int, type(None))
LAYOUT_OPTIONS: dict[str, dict[str, Kind]] = {
    "windows": {},
    "padded": {"keep": ("last", "first"), "min_tokens": int},
    "packed": {
        "algorithm": tuple(ALGORITHMS),
        "long_documents": ("truncate", "fragment"),
        "source_group_size": int,
        "ties": TIES,
        "max_segments": COUNT_OR_NONE,
        "boundaries": ("auto", "eos"),
        "bos_token_id": COUNT_OR_NONE,
        "seed": int,
        "epochs": int,
        "batch_rows": int,
    },
    "materialized": {},
}
"""Keys that a layout of each kind takes beside `kind` and `sequence_length`."""

SECTIONS: dict[str, dict[str, Kind]] = {
    "corpus": {
        "path": _PATH,
        "format": FORMATS,
        "dtype": str,
        "eos_token_id": int,
        "path_remap": dict,
        "tokenizer": str,
        "pad_token_id": COUNT_OR_NONE,
        "use_loss_mask": bool,
    },
    "layout": {
        "kind": tuple(LAYOUTS),
        "sequence_length": int,
        **{key: kind for options in LAYOUT_OPTIONS.values() for key, kind in options.items()},
    },
    "sampler": {
        "order": tuple(ORDERS),
        "seed": int,
        "global_batch_size": int,
        "global_batch_tokens": int,
        "epochs": int,
        "shuffle": bool,
        "last_batch": LAST_BATCH,
    },
}
"""Keys of each section, and what each takes: types, or the words that it may be."""

OTHERS: dict[str, Kind] = {"transforms": list, "audit": str}
"""Keys beside the sections."""

REQUIRED = {"corpus": ("path",), "layout": ("kind", "sequence_length"), "sampler": ("seed",)}


def validate(config: Mapping[str, Any], where: str) -> None:
    """Check the keys and kinds of a whole config, inherited parts included.

    Raises:
      ConfigError: for the first that is wrong.
    """
    check_keys(config, (*SECTIONS, *OTHERS), where)
    for section, keys in SECTIONS.items():
        stated = config.get(section)
        if not isinstance(stated, Mapping):
            raise ConfigError(f"{where}: {section} is {stated!r}; expected a section with {', '.join(keys)}.")
        check_keys(stated, keys, f"{where}: {section}")
        for key in REQUIRED[section]:
            if key not in stated:
                raise ConfigError(f"{where}: {section} lacks the key {key!r}.")
        for key, value in stated.items():
            check_kind(value, keys[key], f"{where}: {section}.{key}")
    _check_layout(config["layout"], where)
    paths, remap = config["corpus"]["path"], config["corpus"].get("path_remap", {})
    for path in paths if isinstance(paths, list) else ():
        check_kind(path, str, f"{where}: corpus.path: an item")
    for text in (*remap, *remap.values()):
        check_kind(text, str, f"{where}: corpus.path_remap: a prefix or its replacement")
    sampler = config["sampler"]
    if ("global_batch_size" in sampler) == ("global_batch_tokens" in sampler):
        raise ConfigError(f"{where}: sampler: give one of global_batch_size (in rows) and global_batch_tokens.")
    tokens, length = sampler.get("global_batch_tokens"), config["layout"]["sequence_length"]
    if tokens is not None and (length < 1 or tokens < length):
        raise ConfigError(
            f"{where}: sampler.global_batch_tokens is {tokens}, less than one row of layout.sequence_length={length}."
        )
    for key, expected in OTHERS.items():
        if key in config:
            check_kind(config[key], expected, f"{where}: {key}")


def _check_layout(layout: Mapping[str, Any], where: str) -> None:
    """Check that a layout's options are those of its kind."""
    kind = layout["kind"]
    for key in layout:
        owners = [each for each, options in LAYOUT_OPTIONS.items() if key in options]
        if owners and kind not in owners:
            known = ", ".join(("sequence_length", *LAYOUT_OPTIONS[kind]))
            raise ConfigError(
                f"{where}: layout.{key} is an option of kind {' and '.join(owners)}; kind {kind} takes {known}. Take it "
                f"out, or write kind: {owners[0]}."
            )


def check_keys(stated: Mapping[Any, Any], known: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    for key in stated:
        if key not in known:
            near = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.0) if known else []
            hint = f" The nearest that there is: {near[0]!r}." if near else " It takes none."
            raise ConfigError(f"{where}: unknown key {key!r}.{hint}")


def check_kind(value: object, kind: Kind, where: str) -> None:
    if isinstance(kind, tuple) and isinstance(kind[0], str):
        if value not in kind:
            raise ConfigError(f"{where} is {value!r}; expected one of {', '.join(map(str, kind))}.")
        return
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(
            "null" if each is type(None) else each.__name__ for each in names if isinstance(each, type)
        )
        raise ConfigError(f"{where} is {value!r}; expected {expected}.")
