"""Template: how conversations become documents, and what those are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RecordError
from grain_sft.prepare.conversation import DOCUMENT, Conversation
from grain_sft.prepare.special_text import SpecialText
from grain_sft.prepare.strict_json import strings
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TemplateOptions:
    """What a user may choose; each template reads the ones that it has.

    Attributes:
      special_text: "error" for a text that spells a special token, or "encode" it as ordinary text.
      seq_level_weight: a message's weight is divided by its length (openchat).
      condition: before the role prefixes, where the record says none (openchat).
      chat_template: a Jinja template in place of the tokenizer's own (hf, olmo).
      system_prompt: the system text of conversations that have none (episode, episode_tool, openchat).
      add_final_eot: whether the last message ends in <|eot|> too (primer).
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
RenderBatch = Callable[[Sequence[Conversation], Tokenizer, TemplateOptions], list[Result]]


@dataclasses.dataclass(frozen=True)
class Template:
    """A way to render conversations.

    Attributes:
      name: in TEMPLATES.
      render: documents of a batch of conversations.
      schemas: of records that it is made for; with one, that one is meant by "auto".
      roles: that it knows.
      weighted: the loss is float32 weights, not a mask.
      truncation: "first" or "last": the side that is kept of a document that is too long.
      trim_trailing: tokens without loss at the end are cut off, and a document of nothing else is dropped.
      min_tokens: a document of fewer is dropped.
      options: of TemplateOptions that only some templates have, those that it reads.
    """

    name: str
    render: RenderBatch
    schemas: tuple[str, ...]
    roles: tuple[str, ...]
    weighted: bool = False
    truncation: str = "first"
    trim_trailing: bool = False
    min_tokens: int = 1
    options: tuple[str, ...] = ()


def check_conversation(
    conversation: Conversation, template: str, roles: Sequence[str], special: SpecialText | None
) -> None:
    """What every template asks of a conversation.

    Args:
      special: the special tokens that no text may spell; None where such text is encoded as it is.

    Raises:
      RecordError: a role that the template doesn't know, two system texts, or special text.
    """
    for index, message in enumerate(conversation.messages):
        if (message.role == DOCUMENT) != (DOCUMENT in roles):
            raise RecordError(_other_kind(conversation, template))
        if message.role not in roles:
            raise RecordError(
                f"messages[{index}].role: {message.role!r}; template {template} expects one of {', '.join(roles)}."
            )
        if special is not None:
            if special.find(message.content):
                special.check(message.content, f"messages[{index}].content")
            if message.extra:
                check_strings(message.extra, f"messages[{index}]", special)
    if conversation.system is not None and conversation.messages[0].role == "system":
        raise RecordError("system: the record has one, and its first message is another. Remove one of them.")
    if special is not None:
        for where, text in (("system", conversation.system), ("condition", conversation.condition)):
            if text:
                special.check(text, where)
        if conversation.tools:
            check_strings(conversation.tools, "tools", special)


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
    """Whether a message takes loss where loss is a mask: those of the assistant, unless their weight is 0.

    Raises:
      RecordError: a weight that a mask can't express.
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


def check_strings(value: object, where: str, special: SpecialText) -> None:
    """Refuse special text in any string of a parsed value.

    Raises:
      RecordError: there is some.
    """
    for path, text in strings(value, where):
        special.check(text, path)


def no_assistant(by: tuple[str, ...] = ("assistant",)) -> RecordError:
    """The error of a conversation that has nothing to learn."""
    return RecordError(f"messages: none of {' or '.join(repr(role) for role in by)}, so nothing in it takes loss.")
