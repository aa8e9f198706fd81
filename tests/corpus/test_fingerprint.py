"""The fingerprint: what it follows, and what leaves it as it is."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from sft_files import documents, write_episodes

import grain_sft

TOKENS = np.arange(20_000) * 2_654_435_761 % 50_021


@pytest.fixture
def folder(tmp_path, write_tokens):
    write_tokens("data/a.npy", TOKENS)
    write_tokens("data/b.npy", TOKENS[:300])
    return tmp_path / "data"


def fingerprint(where, **options):
    return grain_sft.open_corpus(where, **options).fingerprint


def test_names_labels_headers_and_the_tokenizers_name_are_left_out(folder, tmp_path):
    expected = fingerprint(folder)
    other = shutil.copytree(folder, tmp_path / "other" / "place")
    assert fingerprint(tmp_path / "other") == expected
    (other / "b.npy").rename(other / "c.npy")
    assert fingerprint(other) == expected
    (other / "mix.txt").write_text("web,a.npy\ncode,c.npy\n")
    assert fingerprint(other / "mix.txt", tokenizer="some") == expected
    np.save(other / "a.npy", TOKENS.astype(np.uint32))
    assert fingerprint(other) == expected


def test_order_number_dtype_eos_and_length_change_it(folder):
    first, second = listed = [folder / "a.npy", folder / "b.npy"]
    found = [fingerprint(paths) for paths in (listed, [second, first], listed[:1], [*listed, second])]
    found += [fingerprint(folder, dtype=dtype) for dtype in ("uint8", "uint16", "uint64")]
    found += [fingerprint(folder, eos_token_id=eos) for eos in (0, 1, 100_257)]
    for length in (20_000, 30_000):  # with the same ends
        np.zeros(length, np.uint32).tofile(second)
        found.append(fingerprint(folder))
    assert len(set(found)) == len(found)
    assert fingerprint(folder, eos_token_id=np.int64(7)) == fingerprint(folder, eos_token_id=7)


def test_sidecars_change_it(tmp_path):
    found = {}
    for name, change in (("same", None), ("again", None), ("mask", "mask.bin"), ("index", "episodes.idx")):
        folder = write_episodes(tmp_path / name, documents()) / "train" / "shard_00000"
        if change:
            data = bytearray((folder / change).read_bytes())
            data[8] ^= 1
            (folder / change).write_bytes(data)
        found[name] = fingerprint(tmp_path / name)
    assert found["same"] == found["again"] and len(set(found.values())) == 3


@pytest.mark.parametrize("place", [0, 1023, -1024, -1])
def test_the_first_and_the_last_4_kib_change_it(folder, place):
    before = fingerprint(folder)
    changed = TOKENS.astype(np.uint32)
    changed[place] += 1
    changed.tofile(folder / "a.npy")
    assert fingerprint(folder) != before


def test_it_is_this_one(folder):
    # Runs are resumed by it: whoever changes how it is made must raise FINGERPRINT_VERSION, and this value with it.
    assert fingerprint(folder, eos_token_id=1) == (
        "sha256:c64f2a83cc59bf92c3dfdcb1c31b35098da5b2ff0c1135df77a8772bdf777eca"
    )
