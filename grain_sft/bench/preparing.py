"""Benchmark of `prepare` on chats and on plain documents, compared with the tokenizers' own batch calls."""

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import run_program
from grain_sft.demo import docstrings
from grain_sft.prepare import CHAT_TOKENS, train_tokenizer
from grain_sft.storage import write_bytes

VOCAB_SIZE = 8000
MESSAGE, DOCUMENT = 330, 1800  # characters of the median message and of the median document
BPE, UNIGRAM, HUGGING_FACE = "SentencePiece bpe", "SentencePiece unigram", "tokenizer.json"

# The programs are `_COMMON + _MEMORY` and `_COMMON + _SPEED`. `run_program` adds imports and the function `memory` before them.
# In `_SPEED`, `bare` is the time of the tokenizer's own batch calls for the same texts.
_COMMON = """
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
from grain_sft.prepare import Dataset, Request, load_tokenizer, prepare
path, model, out, template = sys.argv[1:5]
load_tokenizer(model).encode(["import the tokenizer's library before the clock starts"])
def ours(number):
    begin = time.process_time()
    manifest = prepare(Request((Dataset((path,)),), template, model, "olmo"), f"{out}-{number}", workers=1)
    counts = manifest["splits"]["train"]
    return time.process_time() - begin, {name: counts[name] for name in ("documents", "tokens")}
"""
_MEMORY = """
before = memory()["peak_mb"]
print(json.dumps({**ours(0)[1], "mb_before": before, **memory()}))
"""
_SPEED = """
import statistics
with open(path, "rb") as file:
    records = [json.loads(line) for line in file]
texts = [part["content"] for record in records for part in record.get("messages") or [{"content": record["text"]}]]
batches = [texts[start : start + 1000] for start in range(0, len(texts), 1000)]
if model.endswith(".json"):
    import tokenizers
    own = tokenizers.Tokenizer.from_file(model)
    encode = lambda batch: [encoding.ids for encoding in own.encode_batch(batch, add_special_tokens=False)]
else:
    import sentencepiece
    own = sentencepiece.SentencePieceProcessor(model_file=model)
    encode = lambda batch: own.encode(batch, num_threads=1)
turns = []
for number in range(int(sys.argv[5])):
    begin = time.process_time()
    tokens = sum(len(ids) for batch in batches for ids in encode(batch))
    bare = time.process_time() - begin
    seconds, counts = ours(number)
    turns.append((bare / seconds, bare, seconds))
of_bare, bare, seconds = map(statistics.median, zip(*turns))
mb = sum(len(text.encode()) for text in texts) / 1e6
print(json.dumps({**counts, "bare_tokens": tokens, "of_bare": of_bare, "bare_mb_per_s": mb / bare,
                  "mb_per_s": mb / seconds, "bytes_a_token": 1e6 * mb / tokens}))
"""


def preparing(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield a table of the speed and the memory of `prepare`, on one core.

    Speeds are megabytes of text per CPU second. Memory is also measured on a tenth of the documents, to show that memory does
    not grow with the number of documents.
    """
    rows: dict[str, dict[str, Any]] = {}
    text = "\n".join(entry.text for entry in docstrings())
    models = _tokenizers(folder, text)
    kinds = {"chats": ("primer", BPE, scale.conversations)}
    kinds |= {f"documents, {name}": ("text", name, scale.texts) for name in models}
    for kind, (template, model, total) in kinds.items():
        for count in (max(1, total // 10), total):
            title = f"{kind}, {count:,}"
            path = folder / f"{template}-{count}.jsonl"
            if not path.exists():
                _write(path, text, count, chats=kind == "chats")
            files = (str(path), models[model])
            rows[title] = run_program(_COMMON + _MEMORY, *files, str(folder / title), template)
        # the speed is measured with all documents, so `title` and `files` are those of the last `count`
        rows[title] |= run_program(_COMMON + _SPEED, *files, str(folder / kind), template, str(scale.repeats))
    columns = {"MB/s": "{mb_per_s:.2f}", "tokenizer alone": "{bare_mb_per_s:.2f}", "of tokenizer": "{of_bare:.2f}"}
    columns |= {"bytes a token": "{bytes_a_token:.2f}", "MB before": "{mb_before:.0f}", "peak MB": "{peak_mb:.0f}"}
    yield Table("prepare", "preparing, one core", columns, rows)


def _tokenizers(folder: Path, text: str) -> dict[str, str]:
    """Train a tokenizer of each installed kind on the lines of `text`. Return their paths by name."""
    lines = [line for line in text.splitlines() if line]
    paths = {BPE: str(folder / "bpe.model"), UNIGRAM: str(folder / "unigram.model")}
    for path in paths.values():
        write_bytes(path, train_tokenizer(lines, VOCAB_SIZE, CHAT_TOKENS, model_type=Path(path).stem))
    if all(importlib.util.find_spec(name) for name in ("tokenizers", "transformers")):
        import tokenizers

        trained = tokenizers.ByteLevelBPETokenizer()
        trained.train_from_iterator(lines, VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False)
        paths[HUGGING_FACE] = str(folder / "tokenizer.json")
        trained.save(paths[HUGGING_FACE])
    return paths


def _write(path: Path, text: str, count: int, *, chats: bool) -> None:
    """Write `count` conversations of two messages, or plain documents. Their texts are random parts of `text`."""
    draw = random.Random(0)

    def cut(median: int, spread: float) -> str:
        start, length = draw.randrange(len(text)), int(median * draw.lognormvariate(0, spread))
        # `prepare` refuses texts that spell a special token, such as <|endoftext|>
        return text[start : start + length].replace("<|", "< |") or "end"

    record: dict[str, Any]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            if chats:
                record = {"messages": [{"role": role, "content": cut(MESSAGE, 0.3)} for role in ("user", "assistant")]}
            else:
                record = {"text": cut(DOCUMENT, 1.0)}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
