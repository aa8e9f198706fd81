"""Folders in which the code blocks of documentation pages run, and a comparison of their output with the page."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import doc_pages as pages
from python_runs import run_python

SECONDS = 900  # time limit of a page; only a hang takes so long, even on a busy machine
YOUR_FOLDER, YOUR_CACHE = "/home/you/run", "~/.cache/grain_sft"
"""How pages spell the working directory and the cache folder."""

_NUMBER = re.compile(r"0x[0-9a-f.]+p[+-]\d+|-?\d[\d,.]*(?:e[+-]?\d+)?")
_KINDS = {"numbers": _NUMBER.pattern, "seconds": r"\d[\d.]*(?= s\b)", "last": r"\S+$"}
"""What a block's `varies` may name besides words: all numbers, numbers of seconds, or the last word of each line."""


class Folders:
    """A folder for each page. The blocks of the page run there once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._printed: dict[str, list[tuple[pages.Block, str]]] = {}

    def run(self, page: str) -> list[tuple[pages.Block, str]]:
        """Return the blocks of `page` and what each printed. They run once, in a copy of the folder of `runs_after(page)`."""
        if page not in self._printed:
            folder = self._root / Path(page).stem
            before = pages.runs_after(page)
            if before is None:
                folder.mkdir()
            else:
                self.run(before)
                shutil.copytree(self._root / Path(before).stem, folder, symlinks=True)
            chosen = [block for block in pages.blocks(page) if block.runs]
            self._printed[page] = list(zip(chosen, self._run(page, folder, chosen), strict=True))
        return self._printed[page]

    def _run(self, page: str, folder: Path, chosen: list[pages.Block]) -> list[str]:
        listed, outputs, cache = folder.with_suffix(".json"), folder.with_suffix(".outputs.json"), self._root / "cache"
        blocks = [{**block._asdict(), "file_name": block.file_name, "page": page} for block in chosen]
        listed.write_text(json.dumps(blocks))
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(pages.DOCS.parent), os.environ.get("PYTHONPATH", ""), "."]),
            "GRAIN_SFT_CACHE_DIR": str(cache),
            "JAX_PLATFORMS": "cpu",
            "LC_ALL": "C.UTF-8",  # sorts the output of `ls`
            "JAX_COMPILATION_CACHE_DIR": str(self._root / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        }
        program = Path(__file__).with_name("run_page.py")
        run_python(program, listed, outputs, cwd=folder, timeout=SECONDS, **environment)
        printed = json.loads(outputs.read_text())
        return [each.replace(str(cache), YOUR_CACHE).replace(str(folder), YOUR_FOLDER) for each in printed]


def first_lost(block: pages.Block, printed: str) -> str | None:
    """Return the first line of `block.shows` that `printed` lacks. Return None if `printed` has all of them, in their order.

    The width of spaces, and what `block.varies` lists, may differ.
    """
    lines = iter([line for line in map(_spaced, printed.splitlines()) if line])
    for shown in filter(str.strip, (block.shows or "").splitlines()):
        pattern = _pattern(_spaced(shown), block.varies)
        if not any(pattern.fullmatch(line) for line in lines):
            return shown
    return None


def updated(block: pages.Block, printed: str) -> str:
    """Return `block.shows` with its lines replaced by the similar lines of `printed`. A line without a similar one stays."""
    lines, found = printed.splitlines(), []
    for shown in (block.shows or "").splitlines():
        exact = [number for number, line in enumerate(lines) if _spaced(line) == _spaced(shown)]
        similar = [number for number, line in enumerate(lines) if _rough(line) == _rough(shown)]
        number = next(iter(exact or similar), None) if shown.strip() else None
        found.append(shown if number is None else lines[number].rstrip())
        lines = lines if number is None else lines[number + 1 :]
    return "".join(f"{line}\n" for line in found)


def _pattern(line: str, varies: tuple[str, ...]) -> re.Pattern[str]:
    fixed = re.split("|".join(_KINDS.get(each, re.escape(each)) for each in varies), line) if varies else [line]
    return re.compile(r"\S+".join(map(re.escape, fixed)))


def _spaced(line: str) -> str:
    return " ".join(line.split())


def _rough(line: str) -> str:
    """Return `line` with # in place of numbers and hashes, to find similar lines."""
    return _spaced(_NUMBER.sub("#", re.sub(r"[0-9a-f]{16,}", "#", line)))
