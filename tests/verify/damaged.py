"""Helpers that write corpora, damage their files, and check what `verify` finds."""

from pathlib import Path

import numpy as np
from sft_files import EOS, documents, write_episodes, write_olmo, write_openchat, write_primer

from grain_sft.verify import Report, verify

VOCABULARY = 1000
LENGTH = 64


def write(kind: str, root: Path, count: int = 300, **options) -> Path:
    """Write a corpus of `count` documents in the format `kind`, and return its folder."""
    docs = documents(count, weights=kind in ("episodes", "openchat"))
    writers = {"olmo": write_olmo, "episodes": write_episodes, "primer": write_primer, "openchat": write_openchat}
    own = {"olmo": {"part_tokens": max(2000, 8 * count), "sources": True}, "episodes": {"shards": 2}}
    return writers[kind](root / kind, docs, **own.get(kind, {}), **options)


def check(where, *, full=True, vocab_size=VOCABULARY, **options) -> Report:
    opening = {"eos_token_id": EOS} if Path(where).suffix != ".json" else None  # a JSON index or config has its own
    return verify(where, full=full, vocab_size=vocab_size, options=opening, **options)


def wrongs(report: Report) -> list[tuple[str, str, str]]:
    """Return (check, name of the file, place) of each fault."""
    return [(each.check, Path(each.where).name, each.place) for each in report.findings if each.wrong]


def sentences(report: Report) -> str:
    """Return the sentences of all faults, one line each."""
    return "\n".join(str(each) for each in report.findings if each.wrong)


def assert_finds(where, wrong, words="", **options) -> Report:
    """Assert that a check finds exactly the faults `wrong`, and that their sentences have `words`. Return the report."""
    report = check(where, **options)
    assert wrongs(report) == wrong and words in sentences(report), report.findings
    return report


def write_train(root: Path, tokens, mask, pairs) -> Path:
    """Write a corpus of episodes in one shard. `pairs` has the (start, length) of each episode."""
    (root / "train").mkdir(parents=True)
    np.asarray(tokens, "<u2").tofile(root / "train/tokens.bin")
    np.asarray(mask, "u1").tofile(root / "train/mask.bin")
    np.asarray(pairs, "<u8").tofile(root / "train/episodes.idx")
    return root


def poke(path: Path, dtype, place: int, value) -> None:
    array = np.fromfile(path, dtype)
    array[place] = value
    array.tofile(path)
