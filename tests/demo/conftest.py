"""Fixtures of the demo's tests."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest
from small_chat import Chat, make_chat


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return make_chat(tmp_path_factory.mktemp("chat") / "demo")
