"""Chats whose text tries to break out of whatever shows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from grain_sft.prepare import Dataset, Request, prepare
from grain_sft.prepare.training import train_tokenizer

SPECIAL = ("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>")
LENGTH = 512

HOSTILE = (
    "</script><script>document.title = 'broken'</script>",
    "<img src=x onerror=\"document.title = 'broken'\">",
    "<!-- <![CDATA[ ]]> &lt;b&gt; &amp; \u2028 \u2029",
    "\x1b]0;broken\x07 \x1b[31mred\x1b[0m \x08\x7f\x9b31m",
    "marks \u202e of direction \u2066 and \u200f others",
    "שלום עולם و مرحبا",
    "日本語のテキスト 😀 👨\u200d👩\u200d👧",
    "\u0301alone, e\u0301 with its letter, \ufeff and zero\u200bwidth",
    "tab\tand\n\n    def f():\n\treturn '⟦ ⟧ · ⏎'",
    "</style></textarea></title></noscript>",
)
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box", "my"]
LOOP = "again and " * 60


def write_run(folder: Path) -> Path:
    """Prepare two inputs of chats and write a config; returns its path."""
    random = np.random.default_rng(0)
    answers = [f"{' '.join(random.choice(WORDS, 30))} {HOSTILE[at % len(HOSTILE)]}" for at in range(60)]
    answers[7] = answers[31] = LOOP
    inputs = {"one.jsonl": answers[:20], "two & <b>.jsonl": answers[20:]}
    for name, part in inputs.items():
        chats = [
            [{"role": "user", "content": f"tell me of {at}"}, {"role": "assistant", "content": answer}]
            for at, answer in enumerate(part)
        ]
        (folder / name).write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "spm.model").write_bytes(train_tokenizer([" ".join(WORDS), "tell me of 0123456789"] * 40, 330, SPECIAL))
    datasets = tuple(Dataset((str(folder / name),)) for name in inputs)
    request = Request(datasets, "primer", str(folder / "spm.model"), "episodes", val_frac=0.0, shard_tokens=5000)
    prepare(request, folder / "chats", workers=1)
    config = {
        "corpus": {"path": str(folder / "chats")},
        "layout": {"kind": "packed", "sequence_length": LENGTH},
        "sampler": {"order": "olmo", "seed": 1, "global_batch_size": 4, "epochs": 4},
        "transforms": ["shift_targets"],
    }
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    return path
