"""What the README says runs as it is written there."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]


def test_the_code_of_the_readme_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    tokens = tmp_path / "data" / "allenai" / "dolma3-tokenizer"
    tokens.mkdir(parents=True)
    np.random.default_rng(0).integers(0, 100_278, 2048 * 20 + 5, np.uint32).tofile(tokens / "0.npy")
    (tmp_path / "data" / "mix.txt").write_text("web,{TOKENIZER}/0.npy\n")
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"1000 (8, 2048) {8 * 2047} targets"
    assert (tmp_path / "data" / "index.json").exists()


def test_every_command_of_the_table_names_tests_that_exist():
    commands = re.findall(r"`(pytest [^`]*)`", (ROOT / "README.md").read_text())
    assert len(commands) >= 6
    given = [shlex.split(command)[1:] for command in commands]
    collect = "import json, sys, pytest\n" + (  # in one process: importing the tests is what takes long
        "for each in json.loads(sys.argv[1]):\n"
        "    if pytest.main(['-n0', '--collect-only', '-q', *each]): sys.exit(f'nothing is collected by {each}')"
    )
    command = [sys.executable, "-c", collect, json.dumps(given)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr


def test_the_readme_names_what_there_is():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"configs/\w+\.\w+", text):
        assert (ROOT / path).exists(), path
    assert shutil.which("grain-sft") or Path(sys.executable).with_name("grain-sft").exists()
