"""Fixtures for tests that prepare whole corpora."""

from pathlib import Path
from typing import Any

import pytest
from prepared import FIM, Place, save_trained
from template_rules import SPECIAL, save_tokenizers

from grain_sft.prepare.records import inputs


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The path of a tokenizer for each template."""
    return save_tokenizers(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model with the special tokens of every template and those of fill-in-the-middle."""
    return save_trained(tmp_path_factory.mktemp("spm"), (*SPECIAL, *FIM), 450)


@pytest.fixture
def many_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every input into several units of work, and render each unit alone."""
    monkeypatch.setattr(inputs, "MAX_BLOCKS", 1)
    monkeypatch.setattr(inputs, "BLOCK", 300)
    monkeypatch.setattr(inputs, "GROUP_BYTES", 1)


@pytest.fixture
def place(tmp_path: Path, tokenizers: dict[str, str], run_command: Any) -> Place:
    return Place(tmp_path, tokenizers, run_command)
