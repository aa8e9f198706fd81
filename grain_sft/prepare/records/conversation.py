"""`Conversation` and `Message`: the parsed form of the records of all schemas."""

from collections.abc import Mapping
from typing import Any

import msgspec

Record = dict[str, Any]  # a parsed JSON object, or a row of a table
Roles = tuple[str, ...]

DOCUMENT = "document"
"""Role of the only message of a plain document."""

CALLS = ("tool_calls", "function_calls")  # keys of a message's tool calls
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of the assistant's thoughts
OPTIONAL = (*CALLS, *REASONING, "functions", "think")  # keys of a message that some templates do not read


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation.

    Attributes:
      role: Role in the record ("user", "assistant", "toolresult", ...).
      content: Text; "" if the message has no text, such as a message that only calls tools.
      weight: Loss weight of the message's tokens, or None.
      extra: Other keys of the message that are not null, and `content` if it is not a string.
    """

    role: str
    content: str
    weight: float | None = None
    extra: Mapping[str, Any] | None = None


class Conversation(msgspec.Struct, frozen=True):
    """One parsed record.

    Attributes:
      messages: Turns, in order; at least one.
      system: System text outside the messages; None if the record has none.
      condition: Words before OpenChat's role prefixes, such as "GPT4 Correct" in "GPT4 Correct User:".
      tools: The record's `tools`, for chat templates that render them.
      rejected: In a preference pair, the conversation with the rejected response; `messages` has the chosen one.
    """

    messages: tuple[Message, ...]
    system: str | None = None
    condition: str = ""
    tools: tuple[Any, ...] | None = None
    rejected: "Conversation | None" = None
