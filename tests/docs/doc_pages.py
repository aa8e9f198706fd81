"""Functions that read the pages of docs/: their code blocks and their text."""

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))

RUN = ("bash", "python")

_NEAR = 4  # lines between the end of a block and the text of its output
_BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>not run|varies): (?P<reason>[^\n]+) -->\n\n?)?"
    r"^(?P<fence>```+)(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=fence)\s*?$",
    flags=re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str  # "" where none is named
    text: str
    line: int  # number of its first line in the page
    why_not: str  # reason not to run the block, from a comment `<!-- not run: reason -->` before it; "" without one
    shows: str | None = None  # output of the block, which the page shows in the block after it; None if it shows none
    varies: tuple[str, ...] = ()
    """Parts of `shows` that differ from run to run, from a comment before it: words, or keys of `page_folders._KINDS`."""

    @property
    def file_name(self) -> str | None:
        """Name of the file that the block shows, if its first line is a comment such as `# run.py`; else None."""
        found = re.match(r"# (\S+\.(?:py|yaml|jsonl?))\n", self.text)
        return found and found[1]

    @property
    def end(self) -> int:
        return self.line + self.text.count("\n")

    @property
    def runs(self) -> bool:
        """Whether tests run the block: commands, programs, and files that these read."""
        return not self.why_not and (self.language in RUN or self.file_name is not None)


def read(page: str) -> str:
    return (DOCS / page).read_text()


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text, found = read(page), []
    if "```" in outside_blocks(page):
        raise ValueError(f"{page}: a block does not end.")
    for match in _BLOCK.finditer(text):
        reason = {match["comment"]: match["reason"]}
        line = text.count("\n", 0, match.start("text")) + 1
        block = Block(match["language"], match["text"], line, reason.get("not run", ""))
        before = found[-1] if found else None
        if block.language == "text" and before is not None and before.runs and line - before.end <= _NEAR:
            found[-1] = before._replace(shows=block.text, varies=tuple(reason.get("varies", "").split()))
        found.append(block)
    return found


def runs_after(page: str) -> str | None:
    """Return the page whose folder is copied for the blocks of this page. Return None if they run in an empty folder."""
    found = re.search(r"<!-- runs after: (\S+\.md) -->", read(page))
    return found and found[1]


def outside_blocks(page: str) -> str:
    return _BLOCK.sub("", read(page))
