"""episode, episode_tool: turns between tags, and one `<myPT_eot>` at the end.

Rules: chberclaz/MyPT, scripts/sft/prepare_chat_sft.py and prepare_tool_sft.py. A turn of the assistant takes loss from
after its opening tag to its closing tag; so does the final `<myPT_eot>`: both scripts, in all their versions, give the
token loss where they make the mask from token ids, though the chat script's mask of characters says otherwise and is
not used. A tool call stands between tags of its own within the assistant's. The tool script ends every block with a
line break, which takes no loss; the chat script has none.

A tag is inserted by its id where the tokenizer has it as a special token. Where it doesn't, the tag is encoded as
ordinary text, on its own (with the space that a SentencePiece model puts before a text); since nothing then tells a
tag from a text that spells it, such a text is always an error.

A message's own `context` (of the user), `think` and `cite` (of the assistant) are rendered where there are any; the
record's `context` is metadata, and is not.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from grain_sft.errors import RecordError
from grain_sft.prepare.conversation import Conversation, Message
from grain_sft.prepare.special_text import SpecialText, special_text_of
from grain_sft.prepare.templates.pieces import Piece, render_pieces
from grain_sft.prepare.templates.template import (
    Result,
    Template,
    TemplateOptions,
    check_conversation,
    no_assistant,
    takes_loss,
)
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

EOT = "<myPT_eot>"

_BLOCKS = (
    "system",
    "user",
    "assistant",
    "user_context",
    "assistant_context",
    "toolcall",
    "toolresult",
    "think",
    "cite",
)
_TAGS = (*(tag for block in _BLOCKS for tag in (f"<myPT_{block}>", f"</myPT_{block}>")), EOT)
_CHAT_ROLES = ("system", "user", "assistant", "assistant_context")
_TOOL_ROLES = (*_CHAT_ROLES, "assistant_toolcall", "toolresult")
_ASSISTANT = ("assistant", "assistant_toolcall")


def _render(
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    options: TemplateOptions,
    *,
    name: str,
    roles: tuple[str, ...],
    line_break: str,
) -> list[Result]:
    tags: dict[str, str | list[int]] = {}
    for tag in _TAGS:
        number = tokenizer.token_id(tag)
        tags[tag] = tag if number is None else [number]
    finder = _finder(tokenizer, options, tags)

    def plan(conversation: Conversation) -> list[Piece]:
        check_conversation(conversation, name, roles, finder)
        blocks = _Blocks(tags, line_break)
        system = conversation.system if conversation.system is not None else options.system_prompt
        if system and (conversation.system is not None or conversation.messages[0].role != "system"):
            blocks.add("system", [system])
        for index, message in enumerate(conversation.messages):
            if message.role == "assistant_toolcall" and "name" in (message.extra or {})["arguments"]:
                raise RecordError(
                    f"messages[{index}].arguments: has the key 'name', which is where the tool's name goes."
                )
            _add_turn(blocks, message, takes_loss(conversation, index, by=_ASSISTANT))
        if not any(message.role in _ASSISTANT for message in conversation.messages):
            raise no_assistant(tuple(role for role in roles if role in _ASSISTANT))
        blocks.end()
        return blocks.pieces

    return render_pieces(conversations, plan, tokenizer, loss_dtype=np.bool_)


def _finder(tokenizer: Tokenizer, options: TemplateOptions, tags: dict[str, Any]) -> SpecialText:
    """What no text may spell: the special tokens, unless they are encoded; and tags that are no tokens, in any case."""
    spelled = tuple(tag for tag, value in tags.items() if isinstance(value, str))
    return special_text_of((*spelled, *(tokenizer.special_tokens if options.special_text == "error" else ())))


class _Tag(str):
    """A tag that this template writes; a plain str is never one, whatever it spells."""


class _Blocks:
    """The pieces of one conversation, block after block."""

    def __init__(self, tags: dict[str, str | list[int]], line_break: str) -> None:
        self.pieces: list[Piece] = []
        self._tags = tags
        self._line_break = line_break

    def add(self, block: str, inner: Sequence[str], loss: bool = False) -> None:
        """A block: its opening tag, inner texts and tags, and its closing tag."""
        weight = float(loss)
        tags = self._tags
        self.pieces.append((tags[f"<myPT_{block}>"], 0.0))
        self.pieces += [(tags[part] if type(part) is _Tag else part, weight) for part in inner]
        self.pieces.append((tags[f"</myPT_{block}>"], weight))
        self._break()

    def end(self) -> None:
        self.pieces.append((self._tags[EOT], 1.0))
        self._break()

    def _break(self) -> None:
        if self._line_break:
            self.pieces.append((self._line_break, 0.0))


def _add_turn(blocks: _Blocks, message: Message, loss: bool) -> None:
    extra = message.extra or {}
    if message.role in ("user", "system"):
        blocks.add(message.role, [*_inner("user_context", extra.get("context")), message.content])
    elif message.role == "assistant_context":
        blocks.add("assistant_context", [message.content])
    elif message.role == "assistant":
        inner = [*_inner("think", extra.get("think")), message.content, *_inner("cite", extra.get("cite"))]
        blocks.add("assistant", inner, loss)
    elif message.role == "assistant_toolcall":
        blocks.add("assistant", [*_inner("think", extra.get("think")), *_inner("toolcall", _call(extra))], loss)
    else:
        blocks.add("toolresult", [_result(message, extra)])


def _inner(block: str, text: str | None) -> list[str]:
    return [_Tag(f"<myPT_{block}>"), text, _Tag(f"</myPT_{block}>")] if text else []


def _call(extra: Any) -> str:
    return json.dumps({"name": extra["name"], **extra["arguments"]}, ensure_ascii=False)


def _result(message: Message, extra: Any) -> str:
    """A tool's result as JSON: a text that is JSON as it is, anything else dumped."""
    if "content" in extra:
        return json.dumps(extra["content"], ensure_ascii=False)
    try:
        json.loads(message.content)
    except (ValueError, RecursionError):
        return json.dumps(message.content, ensure_ascii=False)
    return message.content


EPISODE = Template(
    name="episode",
    render=functools.partial(_render, name="episode", roles=_CHAT_ROLES, line_break=""),
    schemas=("episode", "messages", "prompt_completion"),
    roles=_CHAT_ROLES,
    truncation="last",
    min_tokens=2,
    options=("system_prompt",),
)
EPISODE_TOOL = Template(
    name="episode_tool",
    render=functools.partial(_render, name="episode_tool", roles=_TOOL_ROLES, line_break="\n"),
    schemas=("tools", "episode", "messages", "prompt_completion"),
    roles=_TOOL_ROLES,
    truncation="last",
    min_tokens=2,
    options=("system_prompt",),
)
