"""Run the blocks of a page in the working directory, as a reader would: `python run_page.py BLOCKS OUTPUTS`.

BLOCKS is a JSON file of blocks. A block with a file name is written to that file, bash runs commands, and Python blocks
share their variables. The first failure ends the program. OUTPUTS is a JSON file of what each block printed.
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
