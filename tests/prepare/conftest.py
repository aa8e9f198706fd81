"""Fixtures of all tests of preparations."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep caches in a folder of their own."""
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
