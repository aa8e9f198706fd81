"""Documents by EOS, alone or before a BOS: wherever the blocks that are read at once end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import open_corpus
from grain_sft.corpus import content, eos_scan

EOS, BOS = 1, 2


def plainly(files: list[list[int]], bos: int | None) -> list[tuple[int, int]]:
    """(first token, tokens) of each document: one token after the other."""
    found, before = [], 0
    for tokens in files:
        start = 0
        for at, token in enumerate(tokens):
            last = at + 1 == len(tokens)
            if token == EOS and (bos is None or last or tokens[at + 1] == bos):
                found.append((before + start, at + 1 - start))
                start = at + 1
        before += len(tokens)
    return found


@settings(max_examples=examples(150), deadline=None)
@given(
    files=st.lists(st.lists(st.sampled_from([EOS, EOS, BOS, BOS, 3, 4]), max_size=25), min_size=1, max_size=4),
    bos=st.sampled_from([None, BOS, EOS]),
    block=st.integers(1, 9),
)
def test_blocks_change_nothing(files, bos, block):
    with tempfile.TemporaryDirectory() as temp, pytest.MonkeyPatch.context() as patch:
        patch.setattr(eos_scan, "_SCAN_BYTES", 2 * block)
        paths = [Path(temp) / f"{number}.npy" for number in range(len(files))]
        for path, tokens in zip(paths, files, strict=True):
            np.array(tokens, np.uint16).tofile(path)
        start, length = eos_scan.by_eos(open_corpus(paths, dtype="uint16", eos_token_id=EOS), bos)
        assert list(zip(start.tolist(), length.tolist(), strict=True)) == plainly(files, bos)


@pytest.fixture
def remembered(monkeypatch):
    """Hashes of small files, and of files that were just written, are remembered too."""
    monkeypatch.setattr(content, "_REMEMBERED_FROM", 0)
    monkeypatch.setattr(content, "_SETTLED", -1)


def test_a_scan_is_kept_and_found_again(tmp_path, monkeypatch, remembered):
    monkeypatch.setattr(eos_scan, "_KEPT_FROM", 0)
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    scans = []
    scan = eos_scan.scan
    monkeypatch.setattr(eos_scan, "scan", lambda *given: scans.append(given) or scan(*given))
    path, tokens = tmp_path / "0.npy", np.random.default_rng(0).integers(0, 5, 10_000).astype(np.uint16)
    tokens.tofile(path)

    def found(eos=EOS, bos=None):
        return [each.tolist() for each in eos_scan.by_eos(open_corpus(path, dtype="uint16", eos_token_id=eos), bos)]

    first = found()
    assert found() == first and len(scans) == 1
    assert [(start, length) for start, length in zip(*first, strict=True)] == plainly([tokens.tolist()], None)
    assert found(bos=BOS) != first and found(eos=3) != first and len(scans) == 3
    tokens[0] = EOS if tokens[0] != EOS else 4
    tokens.tofile(path)
    assert found() != first and len(scans) == 4
    for kept in (tmp_path / "cache" / "documents").glob("*.arrays"):
        kept.write_bytes(kept.read_bytes()[:-100])
    assert found() == found() and len(scans) == 5


def test_a_large_corpus_is_scanned_once(tmp_path, monkeypatch, remembered):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    tokens = np.random.default_rng(0).integers(0, 500, (eos_scan._KEPT_FROM >> 2) + 1).astype(np.uint32)
    tokens.tofile(tmp_path / "0.npy")
    first = open_corpus(tmp_path / "0.npy", dtype="uint32", eos_token_id=EOS).documents
    assert len(list((tmp_path / "cache" / "documents").glob("*.arrays"))) == 1
    monkeypatch.setattr(eos_scan, "_chunks", None)
    again = open_corpus(tmp_path / "0.npy", dtype="uint32", eos_token_id=EOS).documents
    np.testing.assert_array_equal(again.start, first.start)
    np.testing.assert_array_equal(again.length, first.length)
    assert again.highest_token == first.highest_token == tokens.max()
