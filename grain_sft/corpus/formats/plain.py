"""Token files of no format of ours: `NAME.npy`, and the document boundaries that Dolma's tokenizer writes, `NAME.csv.gz`."""

from __future__ import annotations

from grain_sft.corpus.formats.aligned import Part
from grain_sft.corpus.formats.splits import Split
from grain_sft.corpus.formats.tree import Tree
from grain_sft.storage import files

BOUNDARIES = ".csv.gz"


def owner(path: str, tree: Tree) -> str | None:
    """Return the token file that `path` belongs to: itself, or that of boundaries."""
    return path.removesuffix(BOUNDARIES) + ".npy" if path.endswith(BOUNDARIES) else path


def part(path: str, tree: Tree) -> Part:
    """Return a token file with its boundaries, where it has them."""
    return Part(path, boundaries=boundaries_of(path, tree), continues=False)


def boundaries_of(path: str, tree: Tree) -> str:
    """Return the file of a token file's boundaries; "" where there is none."""
    name = files.name_of(path)
    if not name.endswith(".npy"):
        return ""
    found = tree.beside(path, name.removesuffix(".npy") + BOUNDARIES)
    return files.join(files.parent(path), found[0]) if found else ""


def home(path: str) -> str:
    """Return "": such files belong to no corpus."""
    return ""


def split(home: str, tree: Tree) -> Split:
    """Return a split of which nothing is known."""
    return Split()
