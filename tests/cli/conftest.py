"""Fixtures: a cache of its own for each test, the figures that a command writes, and the errors of a command that fails."""

import json

import pytest

from grain_sft.cli.main import main


@pytest.fixture(autouse=True)
def cache(own_cache):
    """Keep caches below `tmp_path`."""


@pytest.fixture
def failure(capsys):
    """`failure(*words)`: the exit status, 1 or 2, and stderr of a command that fails."""

    def fail(*words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as exit:
            status = exit.code
        error = capsys.readouterr().err
        assert status in (1, 2) and "Traceback" not in error
        return status, error

    return fail


@pytest.fixture
def figures(tmp_path):
    """`figures(*words)`: the figures that a command writes to a file."""

    def measured(*words):
        out = tmp_path / "figures.json"
        assert main([*map(str, words), "--output", str(out)]) == 0
        return json.loads(out.read_text())

    return measured
