"""Fixtures of the tests of `view`: a corpus of chats whose texts could break a page or a terminal, configs, and a browser."""

import json

import numpy as np
import pytest
from batches import load, sections, write_config
from chromium import chromium
from prepared import chat, save_trained

from grain_sft.prepare import Dataset, Request, prepare
from grain_sft.view import texts_of

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


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Path of a config over two files of chats, with four packed rows of 512 tokens a step. Only answers take loss."""
    folder, random = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    answers = [f"{' '.join(random.choice(WORDS, 30))} {HOSTILE[at % len(HOSTILE)]}" for at in range(60)]
    answers[7] = answers[31] = LOOP
    inputs = {"one.jsonl": answers[:20], "two & <b>.jsonl": answers[20:]}
    for name, part in inputs.items():
        chats = [chat(f"tell me of {at}", answer) for at, answer in enumerate(part)]
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in chats))
    path = folder / "run.json"
    tokenizer = save_trained(folder, size=330, texts=[" ".join(WORDS), "tell me of 0123456789"] * 40)
    datasets = tuple(Dataset((str(folder / name),)) for name in inputs)
    request = Request(datasets, "primer", str(tokenizer), "episodes", val_frac=0.0, shard_tokens=5000)
    path.write_text(json.dumps(sections(folder / "chats", 512, epochs=4) | {"transforms": ["shift_targets"]}))
    prepare(request, folder / "chats", workers=1)
    return path


@pytest.fixture(scope="session")
def pipeline(run):
    return load(run)


@pytest.fixture(scope="session")
def texts(pipeline):
    return texts_of(pipeline.source.layout.corpus, None)


@pytest.fixture
def config(run, tmp_path):
    """`config(**sections)` returns the path of a config like `run`, with these sections changed. None removes a section."""

    def write(**changed):
        stated = json.loads(run.read_text())
        for name, part in changed.items():
            stated[name] = {**stated[name], **part} if isinstance(part, dict) else part
        return write_config(tmp_path / "changed.json", {key: part for key, part in stated.items() if part is not None})

    return write


@pytest.fixture
def mixture(config, write_tokens):
    """Path of a config that mixes the chats with windows of plain tokens, 2 to 1. From step 2 on, batches are half as large."""
    stated = json.loads(config().read_text())
    tokens = write_tokens("web.npy", np.arange(20_000) % 190 + 60, "uint32")
    web = {"weight": 1, "path": str(tokens), "dtype": "uint32", "eos_token_id": 100, "layout": {"kind": "windows"}}
    stated["corpus"] = {"mixture": {"chats": {"weight": 2, **stated["corpus"]}, "web": web}}
    stated["sampler"] = {"seed": 0, "global_batch_size": 6, "schedule": [{"step": 2, "global_batch_size": 3}]}
    return write_config(config(), stated)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium. Tests are skipped if none is installed."""
    with chromium() as session:
        yield session
