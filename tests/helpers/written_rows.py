"""Fixtures: a packed layout, and the folder of its rows, written out."""

import pytest
from sft_files import documents, write_episodes

from grain_sft import PackedLayout, open_corpus
from grain_sft.prepare.materialize import materialize


@pytest.fixture
def layout(tmp_path):
    return PackedLayout(open_corpus(write_episodes(tmp_path / "chats", documents(120, longest=90), shards=3)), 64)


@pytest.fixture
def written(tmp_path, layout):
    materialize(layout, tmp_path / "rows", shard_bytes=1 << 10)
    return tmp_path / "rows"
