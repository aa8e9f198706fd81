"""Conversations that are hard to get right: turns, systems, tools, empty texts, emoji, other scripts, long messages."""

from typing import Any

from prepared import chat, turns

TEXTS = (
    "",
    " ",
    "\n\n",
    "plain",
    " leading and trailing ",
    "tabs\tand\r\nline ends\n",
    "emoji 👩‍👩‍👧‍👦 🇳🇵 👍🏽 ☕️",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया 日本語のテキスト 한국어",
    "combining e\u0301 a\u0308, zero width \u200b\u200d\ufeff, mathematical \U0001d49c\U0001d505",
    "almost special <|eo t|> < |sys|> <| usr |>",
    'code: {"key": [1, 2, {"a": "b"}]}\n```python\nprint("x" * 3)\n```',
)
"""Contents of messages. In a conversation, a prefix such as "u3.0" tells its messages apart."""


def chats() -> list[dict[str, Any]]:
    """Return records of the plain schema."""
    found = []
    for number, text in enumerate(TEXTS):
        texts = [f"{who}{number}.{turn} {text}" for turn in range(1 + number % 4) for who in "ua"]
        messages = turns(*texts, *(["and then?"] if number % 5 == 4 else []))
        system = [{"role": "system", "content": f"s{number} {text}"}] if number % 2 else []
        found.append({"messages": [*system, *messages]})
    begins = {"messages": [{"role": "assistant", "content": "it begins"}, {"role": "user", "content": "it ends"}]}
    long = ("long text with words. " * 10_000)[:200_000]
    return [*found, begins, chat("", ""), chat(f"u {long}", f"a {long}"), chat("x" * 200_000, "😀" * 50_000)]


def tool_chats() -> list[dict[str, Any]]:
    """Return records of the tool schema."""
    found = []
    for number, text in enumerate(TEXTS):
        call = {"query": text, "top_k": number, "nested": {"list": [text, None, True]}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"u{number} {text}"},
            {"role": "assistant_toolcall", "name": "workspace.search", "arguments": call},
            {"role": "toolresult", "name": "workspace.search", "content": {"documents": [text], "total": number}},
            {"role": "assistant_toolcall", "name": "workspace.none", "arguments": {}},
            {"role": "toolresult", "name": "workspace.none", "content": '"as text"'},
            {"role": "assistant", "content": f"a{number} {text}"},
        ]
        found.append({"system": f"s{number} {text}" if number % 2 else "", "messages": messages})
    return found


def episode_chats() -> list[dict[str, Any]]:
    """Return records of the episode schema, with a context, passages, notes, thoughts and citations."""
    found = []
    for number, text in enumerate(TEXTS):
        messages = [
            {"role": "user", "content": f"u{number} {text}", "context": f"passage {text}"},
            {"role": "assistant_context", "content": f"note {text}"},
            {"role": "assistant", "content": f"a{number} {text}", "think": f"hm {text}", "cite": "doc.pdf"},
        ]
        more = {"system": f"s {text}", "context": f"episode_id: {number}"}
        found.append({"messages": messages * (1 + number % 2), **more})
    return found


def openchat_chats() -> list[dict[str, Any]]:
    """Return records of OpenChat's schema, some with a weight for each message."""
    found = []
    for number, record in enumerate(chats()):
        items = [turn for turn in record["messages"] if turn["role"] != "system"]
        if number % 3 == 1:
            weights = [0.0 if turn["role"] == "user" else 0.5 + index for index, turn in enumerate(items)]
            items = [{**turn, "weight": weight} for turn, weight in zip(items, weights, strict=True)]
        more = {"condition": "GPT4 Correct", "system": f"s{number}"} if number % 2 else {}
        found.append({"items": items, **more})
    return found
