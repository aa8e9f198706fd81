"""A corpus format of its own: a folder of `*.tok` files, tokens as uint16, with `*.pairs` beside them."""

from pathlib import Path

from grain_sft.corpus import CorpusMetadata
from grain_sft.corpus.formats import DirectoryListing, Format, Split, TokenFile


class Articles(Format):
    """Folder of token files, each with the (start, length) of its documents as uint64 pairs."""

    expected = "a folder with *.tok files"

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        return path if any(Path(path).glob("*.tok")) else None

    def split(self, home: str, listing: DirectoryListing) -> Split:
        files = tuple(str(path) for path in sorted(Path(home).glob("*.tok")))
        return Split(files, CorpusMetadata(eos_token_id=2, pad_token_id=0), dtypes=("uint16",))

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        return TokenFile(path, boundaries=str(Path(path).with_suffix(".pairs")), boundaries_kind="pairs")
