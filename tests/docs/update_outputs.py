"""Update the outputs that pages show: `python tests/docs/update_outputs.py [PAGE ...]`, all pages by default.

The script runs each page, and replaces each line of a shown output by the line that was printed in its place. It prints the
lines for which it finds no such line; change them by hand.
"""

import sys
import tempfile
from pathlib import Path

import doc_pages as pages
from page_folders import Folders, first_lost, updated


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folders = Folders(Path(root))
        for page in names:
            ran = folders.run(page)
            text = pages.read(page)
            for block, printed in ran:
                if block.shows is None or first_lost(block, printed) is None:
                    continue
                new = updated(block, printed)
                text = text.replace(block.shows, new, 1)
                if (lost := first_lost(block._replace(shows=new), printed)) is not None:
                    print(f"{page}:{block.line} shows {lost!r}, but printed\n{printed}")
            (pages.DOCS / page).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:] or ["../README.md", *pages.PAGES])
