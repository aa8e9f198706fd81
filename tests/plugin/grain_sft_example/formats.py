"""A corpus format of the plugin: a folder of `*.tok` files of uint16 tokens, with a `*.pairs` file next to each."""

from pathlib import Path

import numpy as np

from grain_sft.corpus import CorpusMetadata
from grain_sft.corpus.formats import DirectoryListing, Format, Split, TokenFile
from grain_sft.prepare import splits, writers
from grain_sft.prepare.writers.plan import whole_split


class Articles(Format):
    """Folder of token files, each with the (start, length) of its documents as uint64 pairs."""

    expected = "a folder with *.tok files"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        return path if any(Path(path).glob("*.tok")) else None

    def split(self, home: str, listing: DirectoryListing) -> Split:
        files = tuple(str(path) for path in sorted(Path(home).glob("*.tok")))
        return Split(files, CorpusMetadata(eos_token_id=2, pad_token_id=0), dtype="uint16")

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        return TokenFile(path, boundaries=str(Path(path).with_suffix(".pairs")), boundaries_kind="pairs")


def write(plan: writers.Plan, task: writers.Task) -> None:
    """Write the files of a whole split."""
    path, ends = Path(plan.path(task.split, "0.tok")), plan.ends(task.split)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.stack([np.append(0, ends[:-1]), np.diff(ends, prepend=0)], 1).astype("<u8").tofile(path.with_suffix(".pairs"))
    np.concatenate([block.tokens for block in plan.blocks(task)]).astype("<u2").tofile(path)


WRITER = writers.Format(splits.by_random_shuffle, lambda plan: None, whole_split, write, lambda plan: None, holds_loss=False)
