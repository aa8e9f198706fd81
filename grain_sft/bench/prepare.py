"""Preparing conversations, beside bare SentencePiece on the same texts, each size in a process of its own, on one core."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grain_sft.bench import Scale
from grain_sft.bench.measuring import Table, run_program
from grain_sft.demo import docstrings
from grain_sft.prepare import CHAT_TOKENS, train_tokenizer
from grain_sft.storage import write_bytes

VOCAB_SIZE = 8000  # pieces of the model that is trained for it
CHARACTERS = 330  # of a message: some 100 tokens

_PROGRAM = """
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import sentencepiece
from grain_sft.prepare import Dataset, Request, prepare
conversations, model, out = sys.argv[1:4]
bare = {}
if sys.argv[4] == "bare":
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    with open(conversations, "rb") as file:
        texts = [message["content"] for line in file for message in json.loads(line)["messages"]]
    begin = time.perf_counter()
    tokens = sum(map(len, processor.encode(texts, num_threads=1)))
    bare = {"bare_tokens": tokens, "bare_s": time.perf_counter() - begin}
    del texts
request = Request((Dataset((conversations,)),), "primer", model, "olmo")
before = memory()["peak_mb"]
begin = time.perf_counter()
manifest = prepare(request, out, workers=1)
seconds = time.perf_counter() - begin
counts = manifest["splits"]["train"]
print(json.dumps({**bare, "documents": counts["documents"], "tokens": counts["tokens"], "s": seconds,
                  "mb_before": before, "peak_mb": memory()["peak_mb"]}))
"""


def preparing(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield figures with a tenth of the conversations and with all of them, and of bare SentencePiece with all."""
    rows: dict[str, dict[str, Any]] = {}
    count = scale.conversations
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        here = Path(temporary)
        text = "\n".join(entry.text for entry in docstrings())
        model = str(here / "spm.model")
        write_bytes(model, train_tokenizer(filter(None, text.splitlines()), VOCAB_SIZE, CHAT_TOKENS))
        for size, kind in ((max(1, count // 10), "memory"), (count, "memory"), (count, "speed")):
            path = here / f"{size}.jsonl"
            _write(path, text, size)
            words = (str(path), model, str(here / f"{kind}-{size}"), "bare" if kind == "speed" else "alone")
            row = rows[f"{size:,} conversations, {kind}"] = run_program(_PROGRAM, *words)
            row["mtok_per_s"] = row["tokens"] / row["s"] / 1e6
            if kind == "speed":
                bare = row["bare_tokens"] / row["bare_s"] / 1e6
                row["of_bare"], rows["sentencepiece.encode on the same texts"] = (
                    row["mtok_per_s"] / bare,
                    {"mtok_per_s": bare},
                )
    columns = {"Mtok/s": "{mtok_per_s:.2f}", "of bare": "{of_bare:.2f}", "MB before": "{mb_before:.0f}"}
    columns["MB at most"] = "{peak_mb:.0f}"
    yield Table("prepare", "preparing chats, one core", columns, rows)


def _write(path: Path, text: str, count: int) -> None:
    """Write conversations of two messages, cut from `text` at random."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for role in ("user", "assistant"):
                start, length = draw.randrange(len(text)), draw.randrange(CHARACTERS // 2, CHARACTERS * 3 // 2)
                messages.append({"role": role, "content": text[start : start + length].replace("<|", "< |")})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
