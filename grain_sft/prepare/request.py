"""Request: everything that decides the bytes of a prepared corpus."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grain_sft.arguments import as_integer
from grain_sft.errors import PrepareError, shortened
from grain_sft.prepare.schema_mapping import parse_schema
from grain_sft.prepare.strict_json import SURROGATE

VERSION = 2
"""Of the rules by which documents, orders and files are made; a new one makes other bytes."""

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One entry of a mixture: files, and how much of them, in open-instruct's meaning.

    Attributes:
      paths: files, globs or directories that make one dataset.
      amount: with a point a factor ("0.5", "1.0", "3.0": int(factor x records)), else a number of records ("5000").
        Up to once over, a random choice; beyond, whole repeats and a random choice for the rest.
    """

    paths: tuple[str, ...]
    amount: str = "1.0"


@dataclasses.dataclass(frozen=True)
class Request:
    """What to make of which conversations. Every field decides the output; `output` itself and the number of
    processes do not, and are no part of it.

    Attributes:
      datasets: the inputs, in order.
      template: name in `templates.TEMPLATES`.
      tokenizer: path of a SentencePiece model, a `tokenizer.json`, a tiktoken file, or a directory.
      format: name in `writers.FORMATS`.
      schema: of the records: "auto", or a name in `schema.SCHEMAS`, with the file's own names of its keys
        ("prompt_completion:prompt=question,completion=answer").
      seed: of the split and the shuffle.
      shuffle: whether documents are shuffled; None: as the format's own tool does.
      val_frac: share of the records that go to the validation split.
      max_length: tokens; longer documents are cut. None: never.
      keep: "first" or "last" tokens of a document that is cut; None: as the template says.
      on_error: "stop" at the first bad record, or "skip" it.
      special_text: "error" for text that spells a special token, or "encode" it as ordinary text.
      seq_level_weight, condition, chat_template, system_prompt: of the templates that have them.
      part_bytes: of tokens in one part (format olmo).
      shard_tokens: tokens in one shard (format episodes).
      source: the corpus's name in its metadata.
    """

    datasets: tuple[Dataset, ...]
    template: str
    tokenizer: str
    format: str
    schema: str = "auto"
    seed: int = 42
    shuffle: bool | None = None
    val_frac: float = 0.0
    max_length: int | None = None
    keep: str | None = None
    on_error: str = "stop"
    special_text: str = "error"
    seq_level_weight: bool = False
    condition: str | None = None
    chat_template: str | None = None
    system_prompt: str | None = None
    part_bytes: int = GIB
    shard_tokens: int = 50_000_000
    source: str = ""

    def __post_init__(self) -> None:
        if not self.datasets:
            raise PrepareError("no input: expected at least one file of conversations.")
        for field in dataclasses.fields(self):
            check_name(field.name, getattr(self, field.name))
        for dataset in self.datasets:
            for path in dataset.paths:
                check_name("input", path)
        as_integer("seed", self.seed, 0, PrepareError)
        if self.format == "episodes" and self.seed >= 1 << 32:
            raise PrepareError(
                f"seed={self.seed}: expected one below 2**32, for format episodes splits by numpy's RandomState."
            )
        for name, least in (("max_length", 2), ("part_bytes", 8), ("shard_tokens", 1)):
            if getattr(self, name) is not None:
                as_integer(name, getattr(self, name), least, PrepareError)
        if not (isinstance(self.val_frac, int | float) and 0 <= self.val_frac < 1):
            raise PrepareError(f"val_frac={self.val_frac!r}: expected a share from 0 up to, not including, 1.")
        _one_of("keep", self.keep, (None, "first", "last"))
        _one_of("on_error", self.on_error, ("stop", "skip"))
        _one_of("special_text", self.special_text, ("error", "encode"))
        parse_schema(self.schema)
        for dataset in self.datasets:
            parse_amount(dataset.amount)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        fields = dataclasses.asdict(self)
        fields["datasets"] = [{**entry, "paths": list(entry["paths"])} for entry in fields["datasets"]]
        return {"version": VERSION, **fields}


def parse_amount(amount: str) -> float | int:
    """A factor (with a point, as open-instruct tells them apart) or a number of records.

    Raises:
      PrepareError: neither.
    """
    try:
        value = float(amount) if "." in amount else int(amount)
        if value < 0 or not math.isfinite(value):
            raise ValueError
    except ValueError as error:
        raise PrepareError(
            f"amount {amount!r}: expected a factor with a point, such as 0.5, 1.0 or 3.0, or a number of records."
        ) from error
    return value


def check_name(name: str, value: object) -> None:
    """Refuse a text that no JSON file can hold: paths may have bytes that are no UTF-8.

    Raises:
      PrepareError: it is one.
    """
    if isinstance(value, str) and ("\0" in value or (not value.isascii() and SURROGATE.search(value))):
        raise PrepareError(f"{name} {value!a}: has NUL or a byte that is not UTF-8. Rename it, or write it anew.")


def hash_of(value: Any) -> str:
    """SHA-256 of a JSON value, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two dicts of JSON values, as "name: old -> new"; "" where one lacks it."""
    changed = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            changed += [f"{name}.{line}" for line in differences(before, after)]
        elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            pairs = zip(before, after, strict=True)
            changed += differences(
                *({f"{name}[{i}]": entry for i, entry in enumerate(side)} for side in zip(*pairs, strict=True))
            )
        else:
            changed.append(f"{name}: {_short(before)} -> {_short(after)}")
    return changed


def _short(value: Any) -> str:
    return shortened(json.dumps(value))


def _one_of(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise PrepareError(f"{name}={value!r}: expected one of {listed}.")
