"""Formats of corpora on disk: the table `FORMATS`, and `Format`, the base class of its entries.

To add a format, write a subclass of `Format`. Give it to `open_corpus` as `format="package.module:Name"`, or register it in
`FORMATS`.
"""

import contextlib
import numbers
import re
from collections.abc import Sequence

from grain_sft.arguments import check_type
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats.metadata import CorpusMetadata, DirectoryListing
from grain_sft.corpus.formats.scanning import ReadOptions, Split, TokenFile, scan_corpus
from grain_sft.errors import CorpusError
from grain_sft.registry import Registry, entry_errors, is_ours

__all__ = [
    "FORMATS", "CorpusMetadata", "DirectoryListing", "Format", "ReadOptions", "Split", "TokenFile", "checked_part",
    "errors_of", "formats", "scan_corpus",
]  # fmt: skip


class Format:
    """A format of corpora on disk.

    A subclass defines `detect`, `split` and `part`. Instead of `split` and `part`, it may define its own `read`, which usually
    calls `scan_corpus`. If a list, a glob or a mix may name its token files one by one, it also defines `owner` and `home`.
    Sidecar files hold the loss or the document boundaries of a token file.

    Attributes:
      expected: Description of a path of this format, for error messages.
      rank: Number that sorts the formats that `open_corpus` tries for a path of unknown format. Lower ranks are tried first,
        and equal ranks in the order of `FORMATS`.
      any_path: Whether `read` takes any path. If so, and the caller names this format, `detect` is not called.
      lists_paths: Whether a path of this format is a file that lists further paths. `path_remap` then applies to the listed
        paths. It applies to the file's own path only if the file does not exist.
      takes_globs: Whether `read` takes glob patterns.
      takes_lists: Whether `read_list`, not `scan_corpus`, opens a list of token files that all have this format.
      metadata_files: Regular expression of the names of files that hold metadata, never tokens.
    """

    expected = "a path of this format"
    rank = 1
    any_path = False
    lists_paths = False
    takes_globs = False
    takes_lists = False
    metadata_files = ""

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        """Return the path that `read` opens, such as the training split in a folder; None if `path` has another format."""
        return None

    def detect_list(self, paths: Sequence[str], listing: DirectoryListing) -> bool:
        """Return whether a list of paths has this format. `open_corpus` calls this if the caller names no format."""
        return False

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Return the corpus at `found`, the result of `detect`."""
        split = self.whole_split(found, options, listing)
        name = f"{described(self)}.split"
        # another package's `split` may return an object that is not a `Split`
        check_type(f"{name}: its result", getattr(split, "files", split), tuple | list, "a Split whose files are a tuple")
        if not split.files:
            raise CorpusError(f"{found}: {name} returned no files. Return token files, or define `read`.")
        parts = [checked_part(self, path, listing) for path in split.files]
        self.check_parts(parts, options, listing)
        if split.continued is not None:
            parts = [part._replace(continues=part.tokens in split.continued) for part in parts]
        return scan_corpus(split, parts, options)

    def whole_split(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Split:
        """Return `split(found)`. A subclass checks here whether files of the split are missing."""
        return self.split(found, listing)

    def read_list(self, paths: Sequence[str], options: ReadOptions, listing: DirectoryListing) -> Corpus:
        """Return the corpus of a list of paths."""
        raise CorpusError(f"{paths[0]}: this format takes one path, not a list of {len(paths)}. Give the path alone.")

    def split(self, home: str, listing: DirectoryListing) -> Split:
        """Return the token files and the metadata of a split. `home` is a result of `detect` or of the method `home`."""
        return Split()

    def part(self, path: str, listing: DirectoryListing) -> TokenFile:
        """Return the token file `path` with its sidecar files."""
        return TokenFile(path)

    def owner(self, path: str, listing: DirectoryListing) -> str | None:
        """Return the token file of `path`, a token file or one of its sidecar files; None for a file of another format."""
        return None

    def home(self, path: str) -> str:
        """Return a path that identifies the split of a token file, such as its folder; "" if it belongs to no split."""
        return ""

    def check_parts(self, parts: Sequence[TokenFile], options: ReadOptions, listing: DirectoryListing) -> None:
        """Raise CorpusError if these token files must not be opened together."""

    def training_files(self, paths: Sequence[str]) -> list[str]:
        """Return `paths` without the files of a validation split. `paths` are the .npy files below one folder."""
        return list(paths)


FORMATS: Registry[type[Format]] = Registry(
    "corpus format",
    CorpusError,
    {
        "files": "grain_sft.corpus.formats.files:Files",
        "index": "grain_sft.corpus.formats.index:Index",
        "mix": "grain_sft.corpus.formats.mix:Mix",
        "olmo": "grain_sft.corpus.formats.olmo:Olmo",
        "episodes": "grain_sft.corpus.formats.episodes:Episodes",
        "pairs": "grain_sft.corpus.formats.pairs:Pairs",
        "primer": "grain_sft.corpus.formats.primer:Primer",
        "openchat": "grain_sft.corpus.formats.openchat:OpenChat",
        "megatron": "grain_sft.corpus.formats.megatron:Megatron",
        "rows": "grain_sft.corpus.formats.rows:Rows",
    },
    base=Format,
)


def formats() -> list[Format]:
    """Return an instance of each registered format, in the order of `rank`."""
    made = [FORMATS.make(name) for name in FORMATS]
    for form in made:
        check_type(f"{described(form)}: rank", form.rank, numbers.Real, "a number")
        what = f"{described(form)}: metadata_files={form.metadata_files!r}"
        with entry_errors(CorpusError, what, "Give a regular expression."):
            re.compile(form.metadata_files)
    return sorted(made, key=lambda form: form.rank)


def described(form: Format) -> str:
    """Return a format's name in messages, such as "corpus format my_package.formats:Wikidump"."""
    return f"corpus format {type(form).__module__}:{type(form).__qualname__}"


def checked_part(form: Format, path: str, listing: DirectoryListing) -> TokenFile:
    """Return `form.part(path)`. Raise an error if that is not the token file `path`."""
    part = form.part(path, listing)
    if getattr(part, "tokens", None) != path:
        problem = f"{described(form)}.part returned {part} for {path}"
        raise CorpusError(f"{problem}; expected a TokenFile of this path. Fix its code.")
    return part


def errors_of(form: Format) -> contextlib.AbstractContextManager[None]:
    """Return a context that turns exceptions of another package's format into CorpusErrors."""
    return contextlib.nullcontext() if is_ours(type(form)) else entry_errors(CorpusError, described(form), "Fix its code.")
