"""The templates episode and episode_tool: each turn between tags, `<myPT_user>Hi</myPT_user>`, and `<myPT_eot>` at the end.

A turn may contain more tags, such as `<myPT_think>...</myPT_think>`. Template episode_tool also renders tool calls, and adds a
line break after each turn and after `<myPT_eot>`. The assistant's turns take loss, except the opening tag of each turn.
`<myPT_eot>` takes loss.

The templates render the `context` of user and system messages, the `think` of assistant messages and tool calls, and the `cite`
of assistant messages. They do not render the `context` of a record or the content of a tool call.

Source of these rules: chberclaz/MyPT, scripts/sft/prepare_chat_sft.py and prepare_tool_sft.py.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from grain_sft.errors import RecordError
from grain_sft.prepare.records.conversation import Conversation, Message
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.template import Ids, Piece, PiecesTemplate, SpecialText, as_array
from grain_sft.prepare.tokenizers import Tokenizer

EOT = "<myPT_eot>"

_BLOCKS = (
    "system", "user", "assistant", "user_context", "assistant_context", "toolcall", "toolresult", "think", "cite",
)  # fmt: skip
_TAGS = {EOT, *(f"<{slash}myPT_{block}>" for block in _BLOCKS for slash in ("", "/"))}


class Episode(PiecesTemplate):
    """Template `episode`, for chats without tool calls, as MyPT's scripts render them."""

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
        ids = tokenizer.special_tokens
        self._tags: Mapping[str, str | Ids] = {tag: as_array([ids[tag]]) if tag in ids else tag for tag in _TAGS}
        # a tag without a token is itself encoded as text, so a content that spells it is refused even with "encode"
        self.special = SpecialText(self.special.spellings | (_TAGS - ids.keys()))
        self._block_end: list[Piece] = [(self.line_break, 0.0)] if self.line_break else []

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """Return a system block if there is a system text, a block for each message, and the end of the document."""
        self.refuse_calls(conversation, "think")
        pieces: list[Piece] = []
        system = conversation.system
        if system is None and conversation.messages[0].role != "system":
            system = self.chosen.system_prompt
        if system:
            pieces += self._block("system", [(system, 0.0)], 0.0)
        for index, (message, loss) in enumerate(zip(conversation.messages, self.losses(conversation), strict=True)):
            if message.role == "assistant_toolcall" and "name" in (message.extra or {})["arguments"]:
                problem = f"messages[{index}].arguments: has the key 'name', which the template writes for the tool"
                raise RecordError(f"{problem}. Rename it.")
            pieces += self._turn(message, float(loss))
        return [*pieces, (self._tags[EOT], 1.0), *self._block_end]

    def _turn(self, message: Message, loss: float) -> list[Piece]:
        """Return the block of one message. A tool call is a block of the assistant."""
        extra, block = message.extra or {}, message.role
        content: list[Piece] = [(message.content, loss)]
        think = self._inner("think", extra.get("think"), loss)
        match message.role:
            case "user" | "system":
                content = [*self._inner("user_context", extra.get("context"), loss), *content]
            case "toolresult":
                content = [(_result(message, extra), loss)]
            case "assistant":
                content = [*think, *content, *self._inner("cite", extra.get("cite"), loss)]
            case "assistant_toolcall":
                call = json.dumps({"name": extra["name"], **extra["arguments"]}, ensure_ascii=False)
                block, content = "assistant", [*think, *self._inner("toolcall", call, loss)]
        return self._block(block, content, loss)

    def _inner(self, block: str, text: str | None, loss: float) -> list[Piece]:
        """Return `text` between the tags of `block`; [] without a text."""
        if not text:
            return []
        return [(self._tags[f"<myPT_{block}>"], loss), (text, loss), (self._tags[f"</myPT_{block}>"], loss)]

    def _block(self, block: str, inner: Sequence[Piece], loss: float) -> list[Piece]:
        """Return the pieces `inner` between an opening tag without loss and a closing tag with `loss`."""
        return [(self._tags[f"<myPT_{block}>"], 0.0), *inner, (self._tags[f"</myPT_{block}>"], loss), *self._block_end]


class EpisodeTool(Episode):
    """Template `episode_tool`, for chats with tool calls, as MyPT's scripts render them."""

    name = "episode_tool"
    roles = (*Episode.roles, "assistant_toolcall", "toolresult")
    tool_calls = True
    line_break = "\n"


def _result(message: Message, extra: Mapping[str, Any]) -> str:
    """Return a tool's result as JSON. A text that is JSON already stays unchanged."""
    if "content" in extra:
        return json.dumps(extra["content"], ensure_ascii=False)
    try:
        json.loads(message.content)
    except (ValueError, RecursionError):
        return json.dumps(message.content, ensure_ascii=False)
    return message.content
