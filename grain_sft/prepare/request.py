"""`Request`: the options of a preparation, which decide every byte of the corpus."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from grain_sft.arguments import as_paths, check_type
from grain_sft.errors import ConfigError, PrepareError, shortened
from grain_sft.options import check_value, options_of
from grain_sft.prepare.records.schema import check_schema
from grain_sft.prepare.records.strict_json import check_name

VERSION = 2
"""Version of the code that makes a corpus. Another version may make another corpus from the same request."""

GIB = 1 << 30

TEXT_OPTIONS = (
    "bos", "eos", "empty", "normalize", "fim_rate", "fim_spm_rate", "fim_tokens", "fim_split_sample",
    "fim_fragment_rate", "fim_no_prefix",
)  # fmt: skip
"""Names of the options of template `text`, which renders plain documents. No other template reads these options."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Files of a dataset, and how many of its records are used, as in open-instruct.

    Attributes:
      paths: Files, globs or folders.
      amount: Number of records, such as "5000", or a factor, which has a decimal point. The factor "0.5" selects a random half
        of the records. The factor "2.5" selects all records twice, and a random half of them once more.
    """

    paths: tuple[str, ...]
    amount: str = "1.0"

    def __post_init__(self) -> None:
        if isinstance(self.paths, str | os.PathLike):
            raise PrepareError(f"paths: {os.fspath(self.paths)!r} is not a sequence of paths. Put it in a tuple.")
        object.__setattr__(self, "paths", tuple(map(os.fspath, as_paths("paths", self.paths))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Options that templates read. The docstring of `Request` describes them."""

    special_text: Literal["error", "encode"] = "error"
    seed: Annotated[int, msgspec.Meta(ge=0)] = 42
    seq_level_weight: bool = False
    condition: str | None = None
    chat_template: str | None = None
    system_prompt: str | None = None
    bos: bool = False
    eos: bool = True
    empty: Literal["drop", "keep"] = "drop"
    normalize: Literal["NFC", "NFKC"] | None = None
    fim_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    fim_spm_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    fim_tokens: tuple[str, ...] | None = None
    fim_split_sample: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    fim_fragment_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    fim_no_prefix: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        declaration: Callable[..., Any] = type(self)  # mypy does not accept a class as a hashable argument
        for name, option in options_of(declaration).items():
            check_name(name, getattr(self, name))  # refuses texts with NUL or bytes that are not UTF-8
            try:
                check_value(getattr(self, name), option.type, name)
            except ConfigError as error:
                raise PrepareError(str(error)) from None
        if self.fim_tokens is not None:
            object.__setattr__(self, "fim_tokens", tuple(self.fim_tokens))


@dataclasses.dataclass(frozen=True)
class Request(TemplateOptions):
    """Options of a preparation. They decide every byte of the corpus.

    Some options apply to some templates or formats only. Parentheses name these, as in (text).

    Args:
      datasets: Inputs, in order.
      template: Template that renders conversations: a name in `TEMPLATES`, or package.module:Name.
      tokenizer: Path of a SentencePiece model, tokenizer.json, tiktoken file or directory.
      format: Format of the corpus: a name in `FORMATS`, or package.module:Name.
      schema: Schema of the records: "auto", or a name in `SCHEMAS`. A colon and names of keys may follow. With
        prompt_completion:prompt=question,completion=answer, the key question of a record has the prompt.
      seed: Seed of the split, the shuffle and fill-in-the-middle.
      shuffle: Whether documents are shuffled. By default, the format decides: olmo, openchat and primer shuffle.
      val_frac: Share of the records for the validation split, at least 0 and less than 1.
      min_length: Fewest tokens of a document. Shorter documents are dropped. The template may require more tokens.
      max_length: Most tokens of a document; by default unlimited.
      long_documents: Treatment of documents of more than max_length tokens: cut to that length, or dropped.
      keep: Whether a cut document keeps its first or its last tokens; the default depends on the template.
      on_error: Reaction to a bad record: stop the preparation, or skip the record.
      special_text: Treatment of text that spells a special token: an error, or encoded as ordinary text.
      seq_level_weight: Whether a message's weight is divided by its number of tokens (openchat).
      condition: Words before every role in a conversation whose record states no condition (openchat).
      chat_template: Text of a Jinja chat template, which replaces the tokenizer's (hf, olmo).
      system_prompt: System text of conversations without a system text (episode, episode_tool, openchat).
      bos: Whether a document begins with the tokenizer's BOS (text).
      eos: Whether a document ends with the tokenizer's EOS (text).
      empty: Treatment of documents whose text has no tokens: dropped, or kept as their BOS and EOS (text).
      normalize: Form of Unicode to which texts are normalized; by default none (text).
      fim_rate: Share of the documents that are changed for fill-in-the-middle: their middle moves to their end (text).
      fim_spm_rate: Share of the changed documents in which the suffix comes before the prefix (text).
      fim_tokens: Spellings or ids of three special tokens: those before the prefix, the middle and the suffix. The default is
        the tokenizer's own (text).
      fim_split_sample: Special token between the parts of a document, such as files of code. In a changed document, the middle
        of a part moves to the end of the part (text).
      fim_fragment_rate: In a changed document, share of the parts with a moved middle (text).
      fim_no_prefix: Beginning of documents and parts whose middle is never moved (text).
      part_bytes: Bytes of tokens in one token file (olmo).
      shard_tokens: Tokens in one shard (episodes).
      source: Name of the corpus in its metadata.

    Raises:
      PrepareError: An argument has an invalid value.
    """

    datasets: tuple[Dataset, ...]
    template: str
    tokenizer: str
    format: str
    schema: str = "auto"
    shuffle: bool | None = None
    val_frac: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    min_length: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_length: Annotated[int, msgspec.Meta(ge=2)] | None = None
    long_documents: Literal["cut", "drop"] = "cut"
    keep: Literal["first", "last"] | None = None
    on_error: Literal["stop", "skip"] = "stop"
    part_bytes: Annotated[int, msgspec.Meta(ge=8)] = GIB
    shard_tokens: Annotated[int, msgspec.Meta(ge=1)] = 50_000_000
    source: str = ""

    def __post_init__(self) -> None:
        if not self.datasets:
            raise PrepareError("no input: expected at least one file of conversations. Give its path.")
        super().__post_init__()
        object.__setattr__(self, "datasets", tuple(self.datasets))
        if self.max_length is None and self.long_documents == "drop":
            raise PrepareError("long_documents=drop: needs a limit of length. Give max_length.")
        if self.max_length is not None and (self.min_length or 0) > self.max_length:
            raise PrepareError(f"min_length={self.min_length}: expected at most max_length={self.max_length}.")
        for dataset in self.datasets:
            check_type("datasets: an item", dataset, Dataset, "a Dataset")
            parse_amount(dataset.amount)
            for path in dataset.paths:
                check_name("input", path)
        check_schema(self.schema)

    def as_dict(self) -> dict[str, Any]:
        """Return the options and `VERSION` as JSON."""
        return {"version": VERSION, **msgspec.json.decode(msgspec.json.encode(self))}


def parse_amount(amount: str) -> float | int:
    """Return the factor "0.5" as the float 0.5, or the count "5000" as the int 5000."""
    # at most 300 digits, because a float above 1.8e308 would be infinite
    if not isinstance(amount, str) or not re.fullmatch(r"[0-9]{1,300}(\.[0-9]*)?|\.[0-9]+", amount):
        raise PrepareError(f"amount {amount!r}: expected a factor, such as '0.5', or a number of records, as text.")
    return float(amount) if "." in amount else int(amount)


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """Yield the differences between two JSON values as text: "request.seed: 42 -> 7" if `name` is "request"."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{name}[{number}]")
    elif json.dumps(old) != json.dumps(new):  # as text, because 0 == 0.0, but their hashes differ (`artifact.hash_of`)
        yield f"{name}: {shortened(json.dumps(old))} -> {shortened(json.dumps(new))}"
