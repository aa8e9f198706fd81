"""Every code block of the documentation runs, in order, as a reader would run it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import doc_pages as pages
import pytest

SECONDS = 240  # a page, on a machine that others use too
MOST_NOT_RUN = {"cloud.md": 6, "maxtext.md": 6, "preparing.md": 1}
"""Blocks of a page that may say why they can't run here: they need a bucket, a pod, or a trainer."""


class Folders:
    """The folder of each page, as its blocks left it; each page is run once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._done: dict[str, Path] = {}

    def of(self, page: str) -> Path:
        if page not in self._done:
            before = pages.runs_after(page)
            folder = self._root / page.removesuffix(".md")
            if before is None:
                folder.mkdir()
            else:
                shutil.copytree(self.of(before), folder, symlinks=True)
            self._run(page, folder)
            self._done[page] = folder
        return self._done[page]

    def _run(self, page: str, folder: Path) -> None:
        chosen = [{**block._asdict(), "file_name": block.file_name} for block in pages.blocks(page) if block.runs]
        listed, outputs = self._root / f"{page}.json", self._root / f"{page}.outputs.json"
        listed.write_text(json.dumps([{**block, "page": page} for block in chosen]))
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(pages.DOCS.parent), os.environ.get("PYTHONPATH", "")]),
            "GRAIN_SFT_CACHE_DIR": str(self._root / "cache"),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self._root / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        }
        result = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("run_page.py")), str(listed), str(outputs)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert result.returncode == 0, f"{page}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        for block, printed in zip(chosen, json.loads(outputs.read_text()), strict=True):
            if block["shows"] is not None:
                lines = iter(words(printed))
                lost = [line for line in words(block["shows"]) if line not in lines]
                assert not lost, f"{page}:{block['line']} shows {lost}, but printed\n{printed}"


def words(text: str) -> list[str]:
    """The lines of an output, without what differs from machine to machine: numbers, hashes, folders, widths."""
    text = re.sub(r"\S*/(?=plans/|data/)|0x[0-9a-f.]+p[+-]\d+|[0-9a-f]{16,}", "#", text)
    text = re.sub(r"-?\d[\d,.]*", "#", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("page", [page for page in pages.PAGES if any(block.runs for block in pages.blocks(page))])
def test_the_blocks_of_a_page_run(folders, page):
    folders.of(page)


@pytest.mark.parametrize("page", pages.PAGES)
def test_few_blocks_are_not_run_and_each_says_why(page):
    left_out = [block for block in pages.blocks(page) if block.why_not]
    assert len(left_out) <= MOST_NOT_RUN.get(page, 0), [block.line for block in left_out]


@pytest.mark.parametrize("page", pages.PAGES)
def test_blocks_are_of_languages_that_are_run_or_that_nobody_runs(page):
    for block in pages.blocks(page):
        known = block.runs or block.why_not or block.language in ("text", "json", "yaml", "html", "toml")
        assert known or block.language.startswith("{"), f"{page}:{block.line}: language {block.language!r}"
