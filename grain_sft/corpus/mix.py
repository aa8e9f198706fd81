"""OLMo mix files: `label,path` a line, comments, blank lines, `{TOKENIZER}` in paths.

Format: allenai/OLMo-core, src/olmo_core/data/mixes/.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import files

_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}")


def parse_mix(path: str, text: str) -> list[tuple[str, str]]:
    """(path, label) of every line of a mix file, in order, paths as they are written there.

    Raises:
      CorpusError: a malformed line, by its number; or no line at all.
    """
    entries = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 2 or not all(fields):
            raise CorpusError(
                f"{path}:{number}: expected 'label,path', found {shortened(line, 120)!r}. Mend the line, or comment it out "
                "with '#'."
            )
        entries.append((fields[1], fields[0]))
    if not entries:
        raise CorpusError(f"{path}: lists no file; expected lines 'label,path'.")
    return entries


def remap_path(path: str, remap: Mapping[str, str]) -> str:
    """`path` with the longest prefix that `remap` knows replaced, and its `{PLACEHOLDER}` keys filled in anywhere."""

    def fill(text: str) -> str:
        for key, value in remap.items():
            if _PLACEHOLDER.fullmatch(key):
                text = text.replace(key, value)
        return text

    for candidate in (path, fill(path)):
        prefixes = [key for key in remap if not _PLACEHOLDER.fullmatch(key) and candidate.startswith(key)]
        if prefixes:
            longest = max(prefixes, key=len)
            start, rest = remap[longest], candidate[len(longest) :]
            slash = "/" if longest.endswith("/") or not longest else ""  # of a folder, which a Path spells without it
            return fill(start.rstrip("/") + slash + rest.lstrip("/") if slash and start else start + rest)
    return fill(path)


def resolve_relative(mix_path: str, paths: list[str]) -> list[str]:
    """Relative paths of a mix made absolute: they start at the mix's own folder or, if its first file is not there
    but in the working directory, at that one.

    Raises:
      CorpusError: a `{PLACEHOLDER}` was left and no such file exists.
    """
    folder = files.parent(mix_path)
    relative = dict.fromkeys(path for path in paths if not files.is_remote(path) and not os.path.isabs(path))
    base = folder
    if relative and not files.is_remote(folder):
        first = next(iter(relative))
        if not os.path.exists(os.path.join(folder, first)) and os.path.exists(first):
            base = os.getcwd()
    resolved = []
    for path in paths:
        placeholder = _PLACEHOLDER.search(path)
        if path in relative:
            path = f"{base}/{path}"
        if placeholder and (files.is_remote(path) or not os.path.exists(path)):
            raise CorpusError(
                f"{mix_path}: {path} holds the placeholder {placeholder.group()}, and no file has that name. "
                f"Say what it stands for: path_remap={{{placeholder.group()!r}: 'allenai/dolma3-tokenizer'}}, say."
            )
        resolved.append(path)
    return resolved
