"""Fixtures of whole preparations."""

from pathlib import Path

import pytest
from prepared import Place
from template_rules import save_tokenizers


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By template."""
    return save_tokenizers(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture
def place(tmp_path: Path, tokenizers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, tokenizers, capsys)
