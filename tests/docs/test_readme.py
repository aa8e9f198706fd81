"""The README opens with a program, which `test_code_blocks.py` runs, and its figures are those of docs/evidence.md."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import doc_pages as pages
import pytest
from page_folders import first_lost

PAGE = "../README.md"
README = pages.read(PAGE)
ROOT = pages.DOCS.parent


def test_the_readme_opens_with_an_installation_and_a_program_and_four_blocks_have_a_reason_not_to_run():
    blocks = pages.blocks(PAGE)
    assert [block.language for block in blocks[:3]] == ["bash", "python", "bash"]
    assert blocks[0].text.startswith("python -m pip install '.[") and blocks[0].line < 12
    reasons = [block.why_not for block in blocks if block.why_not]
    assert len(reasons) == 4 and reasons.count("installs the package") == 3
    assert [block.file_name for block in blocks if block.file_name] == ["make_data.py", "sft.yaml", "train.py"]


def test_the_two_pip_install_lines_start_the_demo_and_the_tests():
    """Continuous integration runs the lines that begin with "pip install", each in a fresh environment."""
    commands = ["pip install . && grain-sft demo", "pip install -e '.[test]' && pytest"]
    assert re.findall(r"^pip install .*$", README, flags=re.MULTILINE) == commands


def test_the_first_page_of_the_documentation_includes_its_program():
    include = next(block for block in pages.blocks("index.md") if block.language == "{include}")
    start, end = re.findall(r'^:(?:start-after|end-before): "(.*)"$', include.text, flags=re.MULTILINE)
    included = README.partition(start)[2].partition(end)[0]
    assert README.count(start) == README.count(end) == 1
    assert "# make_data.py" in included and "maxtext" in included and "the same losses" in included


def test_the_table_has_at_most_ten_claims_and_each_figure_is_that_of_the_evidence_page():
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", README, flags=re.MULTILINE)[1:]
    evidence = re.findall(r"^\| ([^|]+?) \| [^|]+? \| ([^|]+?) \| [^|]+? \|$", pages.read("evidence.md"), re.MULTILINE)
    assert 5 <= len(rows) <= 10
    for claim, figure in rows:
        assert re.search(r"\d", figure), claim
        assert (re.sub(r"\(docs/", "(", claim), figure) in evidence, claim


@pytest.mark.heavy
def test_the_copied_blocks_of_the_readme_run_in_a_fresh_environment(tmp_path):
    """The test needs a package index. The installation takes 100 s of CPU time, and the first batch comes 15 s later."""
    clone, work, begin = tmp_path / "clone", tmp_path / "work", time.monotonic()
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__"))
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    install, *blocks = pages.blocks(PAGE)
    subprocess.run(["bash", "-ec", install.text], cwd=clone, env=environment, check=True)
    print(f"installed after {time.monotonic() - begin:.0f} s")
    for block in blocks:
        if block.runs and block.file_name is not None:
            Path(work / block.file_name).write_text(block.text)
        elif block.runs:
            command = ["bash", "-ec", block.text]
            result = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
            lost = first_lost(block, result.stdout.replace(str(work), "/home/you/run"))
            assert result.returncode == 0 and lost is None, f"{lost}\n{result.stdout}{result.stderr}"
            print(f"{block.text.splitlines()[-1]}: done after {time.monotonic() - begin:.0f} s")
