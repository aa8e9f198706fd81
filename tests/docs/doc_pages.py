"""The pages of docs/, and what stands in them: code blocks and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))

RUN = ("bash", "python")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
VARIES = re.compile(r"<!-- varies: (.+) -->")
RUNS_AFTER = re.compile(r"<!-- runs after: (\S+\.md) -->")

_NEAR = 4  # lines between the end of a block and the text of its output

_FENCE = re.compile(r"(```+)(\S*)(?: .*|\s*)")
_FILE_NAME = re.compile(r"# (\S+\.(?:py|yaml|jsonl?))\n")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
      language: "" where none is named.
      text: of its lines.
      line: number of its first line in the page.
      why_not: the reason that a comment right before it gives for not running it; "" where there is none.
      shows: the text that the page shows as its output, in the block right after it; None where it shows none.
      varies: what differs from run to run in that text, as a comment right before it lists: words of the text, or
        "numbers", "seconds", or "last" for the last word of each line.
    """

    language: str
    text: str
    line: int
    why_not: str
    shows: str | None = None
    varies: tuple[str, ...] = ()

    @property
    def file_name(self) -> str | None:
        """The file that its first line, a comment, says it is."""
        found = _FILE_NAME.match(self.text)
        return found and found[1]

    @property
    def end(self) -> int:
        """Number of the line that ends it."""
        return self.line + self.text.count("\n")

    @property
    def runs(self) -> bool:
        """Whether it is a command, a program or a file for one of these."""
        return not self.why_not and (self.language in RUN or self.file_name is not None)


def read(page: str) -> str:
    """The text of a page."""
    return (DOCS / page).read_text()


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
      ValueError: a block that does not end.
    """
    found: list[Block] = []
    fence, language, begin, inside = "", "", 0, []
    comments = {NOT_RUN: "", VARIES: ""}  # right before the next block
    for number, line in enumerate(read(page).splitlines(), 1):
        match = _FENCE.fullmatch(line)
        if fence:
            if line.strip() != fence:
                inside.append(line)
                continue
            found.append(Block(language, "".join(f"{each}\n" for each in inside), begin, comments[NOT_RUN]))
            before = found[-2] if len(found) > 1 else None
            if language == "text" and before is not None and before.runs and begin - before.end <= _NEAR:
                found[-2] = before._replace(shows=found[-1].text, varies=tuple(comments[VARIES].split()))
            fence = ""
        elif match:
            fence, language, begin, inside = match[1], match[2], number + 1, []
            continue
        for comment in comments:
            stated = comment.fullmatch(line)
            comments[comment] = stated[1] if stated else (comments[comment] if not line else "")
    if fence:
        raise ValueError(f"{page}:{begin - 1}: the block does not end.")
    return found


def runs_after(page: str) -> str | None:
    """The page in whose folder, as its own blocks left it, those of this page run."""
    found = RUNS_AFTER.search(read(page))
    return found and found[1]


def outside_blocks(page: str) -> str:
    """Return the text of a page without its fenced blocks."""
    return re.sub(r"^(```+).*?^\1\s*$", "", read(page), flags=re.MULTILINE | re.DOTALL)
