"""MaxText trains with the command of docs/text.md, on the corpus that the page makes.

The test takes minutes:
python -m pytest -n0 -m maxtext tests/integrations/test_maxtext_page.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import doc_pages as pages
from maxtext_runs import NEEDED
from page_folders import Folders

pytestmark = NEEDED


def test_maxtext_trains_on_the_corpus_of_the_page(tmp_path):
    Folders(tmp_path).run("text.md")
    [command] = [block.text for block in pages.blocks("text.md") if "grain_sft.integrations.maxtext" in block.text]
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    path = {"PATH": os.pathsep.join(folders), "PYTHONPATH": os.pathsep.join([str(pages.DOCS.parent), *sys.path])}
    options = {"cwd": tmp_path / "text", "env": os.environ | path | {"JAX_PLATFORMS": "cpu"}, "text": True}
    words = ["bash", "-euo", "pipefail", "-c", command]
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert result.returncode == 0, result.stdout[-5000:]
    found = re.findall(r"completed step: (\d+), .*total_weights: (\d+), loss: (\S+),", result.stdout)
    assert [int(step) for step, _, _ in found] == list(range(20))
    assert {int(weights) for _, weights, _ in found} == {8 * 255}
    assert float(found[0][2]) > float(found[-1][2]) + 0.1
    assert "the data were read up to step 20 of 20" in result.stdout
