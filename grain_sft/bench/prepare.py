"""Preparing conversations, beside bare SentencePiece on the same texts, each size in a process of its own."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from grain_sft.demo.text import python_sources
from grain_sft.errors import PrepareError
from grain_sft.prepare.training import CHAT_TOKENS, train_tokenizer
from grain_sft.storage import write_bytes

VOCAB_SIZE = 8000  # pieces of the model that is trained for it
CHARACTERS = 330  # of a message: some 100 tokens

_PROGRAM = """
import json, os, sys, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import sentencepiece
from grain_sft.prepare import Dataset, Request, prepare
conversations, model, out = sys.argv[1:4]
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1e3 for line in file if line.startswith("VmHWM"))
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
before = peak()
begin = time.perf_counter()
manifest = prepare(request, out, workers=1)
seconds = time.perf_counter() - begin
counts = manifest["splits"]["train"]
print(json.dumps({**bare, "documents": counts["documents"], "tokens": counts["tokens"], "s": seconds,
                  "mb_before": before, "peak_mb": peak()}))
"""


def measure(folder: Path, conversations: int) -> dict[str, dict[str, float]]:
    """Figures with a tenth of the conversations and with all of them, and of bare SentencePiece with all.

    All runs are on one core: one process, one thread of SentencePiece.
    """
    figures = {}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        work = Path(temporary)
        texts = [text for source in python_sources() for text in source.documents]
        model = work / "spm.model"
        lines = (line for text in texts for line in text.splitlines() if line)
        write_bytes(str(model), train_tokenizer(lines, VOCAB_SIZE, CHAT_TOKENS))
        for count in (max(1, conversations // 10), conversations):
            path = work / f"{count}.jsonl"
            _write(path, "\n".join(texts), count)
            figures[f"{count:,} conversations, memory"] = _run(path, model, work / f"m{count}", "alone")
        figures[f"{conversations:,} conversations, speed"] = _run(path, model, work / "speed", "bare")
    return figures


def report(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Print the table; returns the figures."""
    print(f"\n{'preparing chats, one core':40}{'Mtok/s':>9}{'of bare':>9}{'MB before':>11}{'MB at most':>12}")
    for name, row in figures.items():
        rate = row["tokens"] / row["s"]
        line = f"{name:40}{rate / 1e6:9.2f}"
        if "bare_s" in row:
            bare = row["bare_tokens"] / row["bare_s"]
            print(f"{'sentencepiece.encode on the same texts':40}{bare / 1e6:9.2f}")
            print(f"{line}{rate / bare:9.2f}")
        else:
            print(f"{line}{'':9}{row['mb_before']:11.0f}{row['peak_mb']:12.0f}")
    return figures


def _write(path: Path, text: str, count: int) -> None:
    """Conversations of two messages, cut from `text` at random places."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for role in ("user", "assistant"):
                start, length = draw.randrange(len(text)), draw.randrange(CHARACTERS // 2, CHARACTERS * 3 // 2)
                messages.append({"role": role, "content": text[start : start + length].replace("<|", "< |")})
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def _run(conversations: Path, model: Path, out: Path, mode: str) -> dict[str, float]:
    command = [sys.executable, "-c", _PROGRAM, str(conversations), str(model), str(out), mode]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().rpartition("\n")[2]
        raise PrepareError(f"a process of the benchmark ended with status {result.returncode}: {reason}")
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures
