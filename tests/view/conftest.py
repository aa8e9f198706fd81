"""A corpus of hostile chats, a config over it, and one browser for all tests of a module."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "prepare"))  # tokenizer_makers.py is for these tests too

from chromium import chromium
from hostile_chats import write_run

from grain_sft import Host, load
from grain_sft.view import texts_of


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Path of the config: packed rows of 512 tokens, four rows a step, loss on answers alone."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAIN_SFT_CACHE_DIR", str(folder / "cache"))
        yield write_run(folder)


@pytest.fixture(scope="session")
def pipeline(run):
    """The pipeline of the config, for one host."""
    return load(run, host=Host(0, 1))


@pytest.fixture(scope="session")
def texts(pipeline):
    """The texts of its tokens."""
    return texts_of(pipeline.source.layout.corpus, None)


@pytest.fixture
def config(run, tmp_path):
    """`config(**sections)`: path of a config over the same corpus, with sections or parts of them changed."""

    def write(**changed):
        sections = json.loads(run.read_text())
        for name, part in changed.items():
            sections[name] = {**sections[name], **part} if isinstance(part, dict) else part
        path = tmp_path / "changed.json"
        path.write_text(json.dumps({key: part for key, part in sections.items() if part is not None}))
        return path

    return write


@pytest.fixture
def mixture(config, write_tokens):
    """Path of a config of the chats and of plain windows, one row of three; from step 2 on batches are half as large."""
    chats = json.loads(config().read_text())["corpus"]["path"]
    tokens = write_tokens("web.npy", np.arange(20_000) % 190 + 60, "uint32")
    web = {"weight": 1, "path": str(tokens), "dtype": "uint32", "eos_token_id": 100, "layout": {"kind": "windows"}}
    path = config(corpus=None, sampler=None)
    sections = json.loads(path.read_text())
    sections["corpus"] = {"mixture": {"chats": {"weight": 2, "path": chats}, "web": web}}
    sections["sampler"] = {"seed": 0, "global_batch_size": 6, "schedule": [{"step": 2, "global_batch_size": 3}]}
    path.write_text(json.dumps(sections))
    return path


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; skips where there is none."""
    with chromium() as session:
        yield session
