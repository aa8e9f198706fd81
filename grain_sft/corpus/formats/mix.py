"""Format mix: OLMo's lists of files. Each line is `label,path`, a comment or blank. Paths may contain `{TOKENIZER}`.

Specification: allenai/OLMo-core, src/olmo_core/data/mixes/.
"""

import os
import re
from collections.abc import Mapping

from grain_sft.corpus.array_file import MAGIC
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.files import LIST_SUFFIXES, TOKEN_SUFFIXES, corpus_of_files
from grain_sft.corpus.formats.metadata import DirectoryListing
from grain_sft.corpus.formats.scanning import ReadOptions
from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import files

_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}")


class Mix(Format):
    """Format of a mix file. A local mix may have any name. A remote mix is recognized by its suffix, such as .txt."""

    expected = "a mix file with lines 'label,path'"
    rank = 0
    any_path = lists_paths = True

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        if files.is_remote(path):
            return path if path.endswith(LIST_SUFFIXES) else None
        head = head_of(path)
        # these are not mixes: a missing or binary file, a .npy file of another name, an index in JSON
        return None if head is None or b"\0" in head or head.startswith((MAGIC, b"{")) else path

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        entries = parse_mix(found, files.read_text(found))
        paths = resolve_relative(found, [options.remap(path) for path, _ in entries])
        return corpus_of_files([(path, label) for path, (_, label) in zip(paths, entries, strict=True)], options, listing)


def head_of(path: str) -> bytes | None:
    """Return the first 512 bytes of a local file, stripped at the left; None for token files, folders and missing files."""
    if path.endswith(TOKEN_SUFFIXES) or not os.path.exists(path) or os.path.isdir(path):
        return None
    return files.read_range(path, 0, 512).lstrip()


def parse_mix(path: str, text: str) -> list[tuple[str, str]]:
    """Return (path, label) for each entry of the `text` of a mix file."""
    entries = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 2 or not all(fields):
            raise CorpusError(f"{path}:{number}: expected 'label,path', found {shortened(line, 120)!r}. Fix the line.")
        entries.append((fields[1], fields[0]))
    if not entries:
        raise CorpusError(f"{path}: lists no file; expected lines 'label,path'. Add one.")
    return entries


def remap_path(path: str, remap: Mapping[str, str]) -> str:
    """Return `path` after the replacements in `remap`, whose keys are prefixes and placeholders such as "{TOKENIZER}".

    All placeholders are replaced. Of the prefixes, only the longest that matches is replaced. If none matches, the prefixes are
    compared again with `path` after its placeholders are replaced.
    """
    placeholders = {key: value for key, value in remap.items() if _PLACEHOLDER.fullmatch(key)}

    def fill(text: str) -> str:
        for key, value in placeholders.items():
            text = text.replace(key, value)
        return text

    for candidate in (path, fill(path)):
        prefixes = [key for key in remap if key not in placeholders and candidate.startswith(key)]
        if prefixes:
            prefix = max(prefixes, key=len)
            replacement, suffix = remap[prefix], candidate[len(prefix) :]
            if replacement and (prefix.endswith("/") or not prefix):  # {"/data/": "/mnt"}: "/data/a" becomes "/mnt/a"
                return fill(f"{replacement.rstrip('/')}/{suffix.lstrip('/')}")
            return fill(replacement + suffix)
    return fill(path)


def resolve_relative(mix_path: str, paths: list[str]) -> list[str]:
    """Return the paths of a mix, with relative paths joined to the mix's folder.

    If the first relative path exists only in the working directory, all are joined to the working directory instead.
    """
    base = files.parent(mix_path)
    first_relative = next(filter(_is_relative, paths), "")
    in_mix_folder = files.is_remote(base) or os.path.exists(os.path.join(base, first_relative))
    if not in_mix_folder and os.path.exists(first_relative):
        base = os.getcwd()
    resolved = []
    for path in paths:
        placeholder = _PLACEHOLDER.search(path)
        path = f"{base}/{path}" if _is_relative(path) else path
        if placeholder and (files.is_remote(path) or not os.path.exists(path)):  # the name of a file may have braces
            fix = f"Give its value, such as path_remap={{{placeholder.group()!r}: 'allenai/dolma3-tokenizer'}}"
            raise CorpusError(f"{mix_path}: {path} holds the placeholder {placeholder.group()}. {fix}.")
        resolved.append(path)
    return resolved


def _is_relative(path: str) -> bool:
    return not files.is_remote(path) and not os.path.isabs(path)
