"""episode, episode_tool: turns between tags, and one `<myPT_eot>` at the end. episode_tool ends blocks with a line break.

Rules: chberclaz/MyPT, scripts/sft/prepare_chat_sft.py and prepare_tool_sft.py. A turn of the assistant takes loss from
after its opening tag to its closing tag; so does the final `<myPT_eot>`, as in the masks that the scripts make of ids. A
tag that the tokenizer lacks is encoded as ordinary text, on its own; then a text that spells it is always an error. A
message's `context`, `think` and `cite` are rendered; the record's `context` is metadata, and is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from grain_sft.errors import RecordError
from grain_sft.prepare.records.messages import Conversation, Message
from grain_sft.prepare.templates.template import Piece, PiecesTemplate, SpecialText, TemplateOptions
from grain_sft.prepare.tokenizers import Tokenizer

EOT = "<myPT_eot>"

_BLOCKS = (
    *("system", "user", "assistant", "user_context", "assistant_context", "toolcall", "toolresult", "think", "cite"),
)
_TAGS = (*(tag for block in _BLOCKS for tag in (f"<myPT_{block}>", f"</myPT_{block}>")), EOT)


class _Tag(str):
    """A tag that this template writes; a plain str is never one, whatever it spells."""


class Episode(PiecesTemplate):
    """Chats of the episode tools."""

    name = "episode"
    roles: ClassVar[tuple[str, ...]] = ("system", "user", "assistant", "assistant_context")
    format = "episodes"
    options = ("system_prompt",)
    learned = ("assistant", "assistant_toolcall")
    truncation = "last"
    min_tokens = 2
    line_break: ClassVar[str] = ""

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        numbers = {tag: tokenizer.token_id(tag) for tag in _TAGS}
        self._tags: Mapping[str, str | list[int]] = {
            tag: tag if number is None else [number] for tag, number in numbers.items()
        }
        spelled = tuple(tag for tag, number in numbers.items() if number is None)
        self.special = SpecialText((*spelled, *(self.special.spellings if self.special else ())))

    def pieces(self, conversation: Conversation) -> list[Piece]:
        pieces: list[Piece] = []
        system = conversation.system
        if system is None and conversation.messages[0].role != "system":
            system = self.chosen.system_prompt
        if system:
            pieces += self._block("system", [system])
        for index, (message, loss) in enumerate(zip(conversation.messages, self.losses(conversation), strict=True)):
            if message.role == "assistant_toolcall" and "name" in (message.extra or {})["arguments"]:
                raise RecordError(f"messages[{index}].arguments: has the key 'name', the place of the tool's name.")
            pieces += self._turn(message, loss)
        return [*pieces, (self._tags[EOT], 1.0), *self._end()]

    def _turn(self, message: Message, loss: bool) -> list[Piece]:
        extra = message.extra or {}
        if message.role in ("user", "system"):
            return self._block(message.role, [*_inner("user_context", extra.get("context")), message.content])
        if message.role == "assistant_context":
            return self._block("assistant_context", [message.content])
        if message.role == "toolresult":
            return self._block("toolresult", [_result(message, extra)])
        thought = _inner("think", extra.get("think"))
        if message.role == "assistant":
            return self._block("assistant", [*thought, message.content, *_inner("cite", extra.get("cite"))], loss)
        call = json.dumps({"name": extra["name"], **extra["arguments"]}, ensure_ascii=False)
        return self._block("assistant", [*thought, *_inner("toolcall", call)], loss)

    def _block(self, block: str, inner: Sequence[str], loss: bool = False) -> list[Piece]:
        """Return an opening tag, texts and tags, and the closing tag."""
        weight = float(loss)
        tags = self._tags
        texts: list[Piece] = [(tags[part] if type(part) is _Tag else part, weight) for part in inner]
        return [(tags[f"<myPT_{block}>"], 0.0), *texts, (tags[f"</myPT_{block}>"], weight), *self._end()]

    def _end(self) -> list[Piece]:
        return [(self.line_break, 0.0)] if self.line_break else []


class EpisodeTool(Episode):
    """Chats of the episode tools that call tools."""

    name = "episode_tool"
    roles = (*Episode.roles, "assistant_toolcall", "toolresult")
    tool_calls = True
    line_break = "\n"


def _inner(block: str, text: str | None) -> list[str]:
    return [_Tag(f"<myPT_{block}>"), text, _Tag(f"</myPT_{block}>")] if text else []


def _result(message: Message, extra: Mapping[str, Any]) -> str:
    """Return a tool's result as JSON: a text that is JSON unchanged, anything else dumped."""
    if "content" in extra:
        return json.dumps(extra["content"], ensure_ascii=False)
    try:
        json.loads(message.content)
    except (ValueError, RecursionError):
        return json.dumps(message.content, ensure_ascii=False)
    return message.content
