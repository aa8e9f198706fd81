"""What tests of whole preparations share: chats, digests of folders, and runs that are stopped half-way."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grain_sft.prepare import FORMATS

CHAT_FORMATS = [name for name in FORMATS if FORMATS[name].holds_loss and not FORMATS[name].of_pairs]
"""Formats of corpora of conversations."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(*texts: str) -> dict[str, Any]:
    """Return a record whose messages are by the user and the assistant in turn."""
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def record(number: int) -> dict[str, Any]:
    texts = []
    for turn in range(1 + number % 3):
        texts.append(f"the question {number}.{turn} " + "word " * (number % 11))
        texts.append(f"the answer {number}.{turn} " + "then " * (number % 17))
    messages = chat(*texts, *(["thanks, word by word"] if number % 5 == 0 else []))["messages"]
    return {"messages": [{"role": "system", "content": "be kind"}, *messages] if number % 4 == 0 else messages}


def write_chats(path: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    """Write `count` records, one a line; lines `bad` are broken."""
    lines = [json.dumps(record(number)) if number + 1 not in bad else "{broken}" for number in range(count)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def digests(out: Path, replace: tuple[str, str] = ("", "")) -> dict[str, str]:
    """Return the hash of every file, the rejected ones too; in texts, the first of `replace` is read as the second."""
    found = {path.relative_to(out).as_posix(): path for path in sorted(out.rglob("*")) if path.is_file()}
    rejected = Path(f"{out}.rejected.jsonl")
    found |= {"rejected": rejected} if rejected.exists() else {}
    assert found
    old, new = (text.encode() for text in replace)
    data = {name: path.read_bytes() for name, path in found.items()}
    texts = {name for name in data if old and name.endswith((".json", ".txt"))}
    changed = {name: value.replace(old, new) if name in texts else value for name, value in data.items()}
    return {name: hashlib.sha256(value).hexdigest() for name, value in changed.items()}


def stamps(folder: Path) -> dict[str, int]:
    """Return when every file and folder was changed, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.lstat().st_mtime_ns for path in folder.rglob("*")}


class StoppedError(Exception):
    """Raised by the progress of a run that is stopped half-way."""


def stop_half_way() -> Callable[[str, int, int], None]:
    """Return a progress that stops a run when half of the inputs are rendered."""

    def progress(what: str, done: int, total: int) -> None:
        if what == "Rendering" and done > total / 2:
            raise StoppedError

    return progress
