"""Fixtures of the demo's tests."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Iterator

import pytest
from small_chat import Chat, make_chat


@pytest.fixture(scope="module", autouse=True)
def plans_in_a_cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return make_chat(tmp_path_factory.mktemp("chat") / "demo")
