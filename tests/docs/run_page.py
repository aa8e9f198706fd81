"""Runs blocks of a page, in order, in the working directory: `python run_page.py BLOCKS`, a JSON file.

As a reader would: files are written under the names that their first lines give, commands go to bash, and Python blocks share
their names. What fails stops it, with the line of the page.
"""

from __future__ import annotations

import json
import linecache
import subprocess
import sys
from pathlib import Path


def main(path: str) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in json.loads(Path(path).read_text()):
        where = f"{block['page']}:{block['line']}"
        if block["file_name"] is not None:
            Path(block["file_name"]).write_text(block["text"])
        elif block["language"] == "bash":
            result = subprocess.run(["bash", "-euo", "pipefail", "-c", block["text"]])
            if result.returncode:
                sys.exit(f"{where}: the commands ended with status {result.returncode}")
        else:
            linecache.cache[where] = (len(block["text"]), None, block["text"].splitlines(keepends=True), where)
            exec(compile(block["text"], where, "exec"), names)


if __name__ == "__main__":
    main(sys.argv[1])
