"""Corpora of each format, damage to their files, and what a check finds."""

from pathlib import Path

import numpy as np
from sft_files import EOS, documents, write_episodes, write_olmo, write_openchat, write_primer

from grain_sft.verify import Report, verify

VOCABULARY = 1000
LENGTH = 64


def write(kind: str, root: Path, count: int = 300, **options) -> Path:
    """A corpus of a format."""
    docs = documents(count, weights=kind in ("episodes", "openchat"))
    writers = {"olmo": write_olmo, "episodes": write_episodes, "primer": write_primer, "openchat": write_openchat}
    own = {"olmo": {"part_tokens": max(2000, 8 * count), "sources": True}, "episodes": {"shards": 2}}
    return writers[kind](root / kind, docs, **own.get(kind, {}), **options)


def check(where, *, full=True, vocab_size=VOCABULARY, **options) -> Report:
    opening = {"eos_token_id": EOS} if Path(where).suffix != ".json" else None  # of a corpus, not of a config
    return verify(where, full=full, vocab_size=vocab_size, options=opening, **options)


def wrongs(report: Report) -> list[tuple[str, str, str]]:
    """(check, name of the file, place) of what is wrong."""
    return [(each.check, Path(each.where).name, each.place) for each in report.findings if each.wrong]


def assert_finds(where, wrong, words="", **options) -> None:
    """Assert that a check finds exactly these faults, and that a sentence has `words`."""
    report = check(where, **options)
    assert wrongs(report) == wrong and words in sentences(report), report.findings


def sentences(report: Report) -> str:
    """What is wrong, a line each."""
    return "\n".join(str(each) for each in report.findings if each.wrong)


def write_train(root: Path, tokens, mask, pairs) -> Path:
    """A corpus of episodes in one shard."""
    (root / "train").mkdir(parents=True)
    np.asarray(tokens, "<u2").tofile(root / "train/tokens.bin")
    np.asarray(mask, "u1").tofile(root / "train/mask.bin")
    np.asarray(pairs, "<u8").tofile(root / "train/episodes.idx")
    return root


def poke(path: Path, dtype, place: int, value) -> None:
    array = np.fromfile(path, dtype)
    array[place] = value
    array.tofile(path)
