"""Conversation: what every schema of records is read into, and what every template renders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DOCUMENT = "document"
"""The role of a plain document, which is its record's only message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
      role: as the record says it ("user", "assistant", "toolresult", ...); templates say which ones they know.
      content: its text; "" where the record has none (an assistant that only calls tools).
      weight: of its loss, where the record says one.
      extra: the message's other keys, values as parsed: name, arguments, tool_calls, ...; `content` itself where it
        is no string (the result of a tool as JSON).
    """

    role: str
    content: str
    weight: float | None = None
    extra: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """One record.

    Attributes:
      messages: its turns, in order; at least one.
      system: the record's own system text, beside the messages; None where it has none.
      context: the record's `context`: metadata of the episode tools, which no template renders.
      condition: what stands before OpenChat's role prefixes ("GPT4 Correct"); "" for none.
      tools: the record's `tools`, for chat templates that render them.
    """

    messages: tuple[Message, ...]
    system: str | None = None
    context: str | None = None
    condition: str = ""
    tools: tuple[Any, ...] | None = None
