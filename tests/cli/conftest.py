"""Fixtures: a cache of its own for each test, and the figures that a command writes."""

import json

import pytest


@pytest.fixture(autouse=True)
def cache(own_cache):
    """Keep caches below `tmp_path`."""


@pytest.fixture
def figures(tmp_path, run_command):
    """`figures(*words)`: the figures that a command writes to a file, and what it prints."""

    def measured(*words):
        out = tmp_path / "figures.json"
        printed = run_command(*words, "--output", out).out
        return json.loads(out.read_text()), printed

    return measured
