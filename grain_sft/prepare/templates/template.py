"""Template: a way to render conversations as tokens, and what every template checks."""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RecordError
from grain_sft.prepare.records.messages import DOCUMENT, Conversation
from grain_sft.prepare.records.strict_json import strings
from grain_sft.prepare.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class TemplateOptions:
    """Choices of a user; each template reads those that it has.

    Attributes:
      special_text: "error" for a text that spells a special token, or "encode" it as ordinary text.
      seq_level_weight: Whether a message's weight is divided by its length (openchat).
      condition: Words before the role prefixes, where the record has none (openchat).
      chat_template: Jinja template in place of the tokenizer's own (hf, olmo).
      system_prompt: System text of conversations that have none (episode, episode_tool, openchat).
      add_final_eot: Whether the last message ends in <|eot|> too (primer).
    """

    special_text: str = "error"
    seq_level_weight: bool = False
    condition: str | None = None
    chat_template: str | None = None
    system_prompt: str | None = None
    add_final_eot: bool = True


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A document: tokens uint32 [n], and loss bool or float32 [n] aligned to them, unshifted."""

    tokens: npt.NDArray[np.uint32]
    loss: npt.NDArray[Any]


Result = Rendered | RecordError


class Template(abc.ABC):
    """A way to render conversations with one tokenizer and one set of options.

    A subclass sets the class attributes where the defaults don't fit, and defines `render`.

    Attributes:
      name: Name in messages.
      roles: Roles that the template renders.
      format: Format of corpora that is written unless another one is chosen.
      messages_schema: Schema of records with the key 'messages', where none is chosen.
      options: Names of the `TemplateOptions` that only some templates have and this one reads.
      weighted: Whether the loss is float32 weights, not a mask.
      truncation: "first" or "last": the end of a document that is kept where the document is too long.
      trim_trailing: Whether tokens without loss at the end are cut off, and a document of nothing else is dropped.
      min_tokens: Length of the shortest document that is kept.
      tool_calls: Whether conversations that call tools are the template's purpose.

    Args:
      tokenizer: Tokenizer of the texts.
      options: Choices of the user.

    Raises:
      PrepareError: The template can't be used with this tokenizer or these options.
    """

    name: ClassVar[str] = "unnamed"
    roles: ClassVar[tuple[str, ...]] = ("system", "user", "assistant")
    format: ClassVar[str] = "olmo"
    messages_schema: ClassVar[str] = "chat"
    options: ClassVar[tuple[str, ...]] = ()
    weighted: ClassVar[bool] = False
    truncation: ClassVar[str] = "first"
    trim_trailing: ClassVar[bool] = False
    min_tokens: ClassVar[int] = 1
    tool_calls: ClassVar[bool] = False

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        self.tokenizer = tokenizer
        self.chosen = options
        self.special = special_text_of(tuple(tokenizer.special_tokens)) if options.special_text == "error" else None

    @abc.abstractmethod
    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        """Return the document of each conversation, or in its place the RecordError that says why it has none."""

    def check(self, conversation: Conversation) -> None:
        """Refuse a role that the template does not render, two system texts, and text that spells a special token."""
        special = self.special
        for index, message in enumerate(conversation.messages):
            if (message.role == DOCUMENT) != (DOCUMENT in self.roles):
                raise RecordError(_other_kind(conversation, self.name))
            if message.role not in self.roles:
                raise RecordError(
                    f"messages[{index}].role: {message.role!r}; template {self.name} expects one of "
                    f"{', '.join(self.roles)}."
                )
            if special is not None:
                if special.find(message.content):
                    special.check(message.content, f"messages[{index}].content")
                if message.extra:
                    special.check(message.extra, f"messages[{index}]")
        if conversation.system is not None and conversation.messages[0].role == "system":
            raise RecordError("system: the record has one, and its first message is another. Remove one of them.")
        if special is not None:
            for where in ("system", "condition", "tools"):
                if value := getattr(conversation, where):
                    special.check(value, where)


def _other_kind(conversation: Conversation, template: str) -> str:
    if conversation.messages[0].role == DOCUMENT:
        return (
            f"the record is a plain document, which template {template} can't render: it would have no turns. "
            "Give --template text for files of documents."
        )
    return (
        f"the record is a conversation; template {template} renders plain documents. Give a chat template, such as hf."
    )


def takes_loss(conversation: Conversation, index: int, *, by: tuple[str, ...] = ("assistant",)) -> bool:
    """Return whether a message takes loss where loss is a mask: those of the assistant, unless their weight is 0.

    Raises:
      RecordError: The weight is one that a mask can't express.
    """
    message = conversation.messages[index]
    theirs = message.role in by
    if message.weight is None or message.weight == (1.0 if theirs else 0.0):
        return theirs
    if theirs and message.weight == 0:
        return False
    expected = "0 or 1" if theirs else f"0, for only messages of {' and '.join(by)} take loss"
    raise RecordError(
        f"messages[{index}].weight: {message.weight:g}; expected {expected}. Template openchat has weights of any size."
    )


def no_assistant(by: tuple[str, ...] = ("assistant",)) -> RecordError:
    """Return the error of a conversation that has nothing to learn."""
    return RecordError(f"messages: none of {' or '.join(repr(role) for role in by)}, so nothing in it takes loss.")


class SpecialText:
    """Finds spellings of special tokens; under 0.1 us for a short text without any of their first characters."""

    def __init__(self, spellings: Sequence[str]) -> None:
        self.spellings = frozenset(spelling for spelling in spellings if spelling)
        self._first = tuple({spelling[0] for spelling in self.spellings})
        longest_first = sorted(self.spellings, key=lambda spelling: (-len(spelling), spelling))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find(self, text: str) -> tuple[str, int] | None:
        """Return the first special token that `text` spells, and its character."""
        for character in self._first:
            if character in text:
                found = self.pattern.search(text)
                return (found.group(), found.start()) if found else None
        return None

    def check(self, value: object, where: str) -> None:
        """Refuse a parsed value with a string that spells a special token."""
        for path, text in strings(value, where):
            if found := self.find(text):
                raise RecordError(
                    f"{path}: spells the special token {found[0]!r} at character {found[1]}. Remove it, or have it "
                    "tokenized as ordinary text with --special-text encode."
                )


@functools.lru_cache(maxsize=16)
def special_text_of(spellings: tuple[str, ...]) -> SpecialText:
    """Return the finder of these spellings, made once."""
    return SpecialText(spellings)
