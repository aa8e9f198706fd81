"""Benchmark of `prepare` on plain documents, compared with the batch calls of the tokenizers themselves."""

import importlib.util
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import run_program
from grain_sft.demo import docstrings
from grain_sft.prepare import train_tokenizer
from grain_sft.storage import write_bytes

VOCAB_SIZE = 8000
MEDIAN = 1800  # bytes of a document, log-normal; the mean is about 3000
EOS = "<|endoftext|>"

_COMMON = """
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
from grain_sft.prepare import Dataset, Request, load_tokenizer, prepare
path, model, out = sys.argv[1:4]
load_tokenizer(model).encode(["imports all that it needs"])
def ours(number):
    begin = time.process_time()
    manifest = prepare(Request((Dataset((path,)),), "text", model, "olmo"), f"{out}-{number}", workers=1)
    return time.process_time() - begin, manifest
"""
_MEMORY = """
before = memory()["peak_mb"]
counts = ours(0)[1]["splits"]["train"]
print(json.dumps({"documents": counts["documents"], "tokens": counts["tokens"], "mb_before": before, **memory()}))
"""
_SPEED = """
import statistics
with open(path, "rb") as file:
    texts = [json.loads(line)["text"] for line in file]
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
for number in range(int(sys.argv[4])):
    begin = time.process_time()
    tokens = sum(len(ids) for batch in batches for ids in encode(batch))
    bare = time.process_time() - begin
    seconds, manifest = ours(number)
    turns.append((bare / seconds, bare, seconds))
    assert manifest["splits"]["train"]["tokens"] == tokens + len(texts)
of_bare, bare, seconds = map(statistics.median, zip(*turns))
mb = sum(len(text.encode()) for text in texts) / 1e6
print(json.dumps({"documents": len(texts), "tokens": tokens, "of_bare": of_bare, "bare_mb_per_s": mb / bare,
                  "mb_per_s": mb / seconds, "bytes_a_token": 1e6 * mb / tokens}))
"""


def texts(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield the speed of `prepare` and of each tokenizer's own batch call, by CPU time on one core, and the memory of
    `prepare` for a tenth of the documents and for all."""
    rows = {}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        here = Path(temporary)
        text = "\n".join(entry.text for entry in docstrings())
        for name, model in _tokenizers(here, text).items():
            for count in (max(1, scale.texts // 10), scale.texts):
                path = here / f"{count}.jsonl"
                if not path.exists():
                    _write(path, text, count)
                out = str(here / f"{name}-{count}")
                row = f"{name}, {count:,} documents"
                rows[row] = run_program(_COMMON + _MEMORY, str(path), model, out)
            out = str(here / f"{name}-speed")
            rows[row] |= run_program(_COMMON + _SPEED, str(path), model, out, str(scale.repeats))
    columns = {"MB/s": "{mb_per_s:.2f}", "tokenizer alone": "{bare_mb_per_s:.2f}", "of it": "{of_bare:.2f}"}
    columns |= {"bytes a token": "{bytes_a_token:.2f}", "MB before": "{mb_before:.0f}", "MB at most": "{peak_mb:.0f}"}
    yield Table("prepare_text", "preparing plain documents, one core", columns, rows)


def _tokenizers(here: Path, text: str) -> dict[str, str]:
    """Train tokenizers on the lines of `text`; return their paths by name."""
    lines = [line for line in text.splitlines() if line]
    found = {}
    for kind in ("bpe", "unigram"):
        found[f"SentencePiece {kind}"] = str(here / f"{kind}.model")
        write_bytes(found[f"SentencePiece {kind}"], train_tokenizer(lines, VOCAB_SIZE, (), model_type=kind))
    if all(importlib.util.find_spec(name) for name in ("tokenizers", "transformers")):
        import tokenizers

        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
        )
        made.train_from_iterator(lines, trainer)
        found["tokenizer.json"] = str(here / "tokenizer.json")
        made.save(found["tokenizer.json"])
    return found


def _write(path: Path, text: str, count: int) -> None:
    """Write documents that are cut from `text` at random."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            start, length = draw.randrange(len(text)), int(MEDIAN * draw.lognormvariate(0, 1))
            found = text[start : start + length].replace("<|", "< |") or "end"
            file.write(json.dumps({"text": found}, ensure_ascii=False) + "\n")
