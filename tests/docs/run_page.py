"""Runs blocks of a page, in order, in the working directory: `python run_page.py BLOCKS OUTPUTS`, two JSON files.

As a reader would: files are written under the names that their first lines give, commands go to bash, and Python blocks share
their names. What fails stops it, with the line of the page. OUTPUTS is written at the end: what each block printed.
"""

import contextlib
import io
import json
import linecache
import subprocess
import sys
from pathlib import Path


def main(blocks: str, outputs: str) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for block in json.loads(Path(blocks).read_text()):
        where, output = f"{block['page']}:{block['line']}", ""
        if block["file_name"] is not None:
            Path(block["file_name"]).write_text(block["text"])
        elif block["language"] == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block["text"]]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            output = result.stdout
            if result.returncode:
                sys.exit(f"{output}{where}: the commands ended with status {result.returncode}")
        else:
            linecache.cache[where] = (len(block["text"]), None, block["text"].splitlines(keepends=True), where)
            with contextlib.redirect_stdout(io.StringIO()) as caught:
                exec(compile(block["text"], where, "exec"), names)
            output = caught.getvalue()
        printed.append(output)
    Path(outputs).write_text(json.dumps(printed))


if __name__ == "__main__":
    main(*sys.argv[1:])
