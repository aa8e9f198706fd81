"""Every code block of the documentation and of the README runs, in order, and prints what the page shows.

The README opens with a program, and its figures are those of docs/evidence.md.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import doc_pages as pages
import pytest
from page_folders import Folders, first_lost, updated

PAGE = "../README.md"
MOST_NOT_RUN = dict.fromkeys(("contributing.md", "index.md", "preparing.md", "text.md", "tutorial.md"), 1)
MOST_NOT_RUN |= {"cloud.md": 6, "maxtext.md": 10, "tunix.md": 3}
"""How many blocks of a page may have a reason not to run: they install the package, or need a bucket, a pod or a trainer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("docs"))


RUN = [page for page in (PAGE, *pages.PAGES) if any(each.runs for each in pages.blocks(page))]


@pytest.mark.pages
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_and_print_what_it_shows(folders, page):
    """`GRAIN_SFT_WRITE_OUTPUTS=1 pytest -m pages tests/docs` writes the printed outputs to the pages."""
    text, faults = pages.read(page), []
    for block, printed in folders.run(page):
        if "GRAIN_SFT_WRITE_OUTPUTS" in os.environ and first_lost(block, printed) is not None:
            shows = updated(block, printed)
            text, block = text.replace(block.shows, shows, 1), block._replace(shows=shows)
            (pages.DOCS / page).write_text(text)
        if (lost := first_lost(block, printed)) is not None:
            faults.append(f"{page}:{block.line} shows {lost!r}, but printed\n{printed}")
    assert not faults, "\n".join([*faults, "GRAIN_SFT_WRITE_OUTPUTS=1 writes printed lines to the page."])


@pytest.mark.pages
def test_the_loss_of_the_readmes_training_goes_down(folders):
    (output,) = (output for block, output in folders.run(PAGE) if block.text.startswith("python train.py 20 | tee"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] + 1


@pytest.mark.parametrize("page", pages.PAGES)
def test_few_blocks_have_a_reason_not_to_run_and_all_other_blocks_run_or_are_data(page):
    left_out = [block.line for block in pages.blocks(page) if block.why_not]
    assert len(left_out) <= MOST_NOT_RUN.get(page, 0), left_out
    for block in pages.blocks(page):
        known = block.runs or block.why_not or block.language in ("text", "json", "yaml", "html", "toml")
        assert known or block.language.startswith("{"), f"{page}:{block.line}: language {block.language!r}"


def test_outputs_are_compared_except_for_what_varies_and_are_updated_line_by_line():
    block = pages.Block("bash", "", 1, "")
    for shows, varies, printed, lost in (
        ("a 1\nc 3\n", (), "a   1\nb 2\nc 3\n", None),
        ("a 1\n", (), "a 2\n", "a 1"),
        ("c 3\na 1\n", (), "a 1\nc 3\n", "a 1"),
        ("a 1 in 0.02 s\n", ("0.02",), "a 1 in 0.35 s\n", None),
        ("a 1 in 0.02 s\n", ("numbers",), "a 2 in 0.35 s\n", None),
        ("a 1 in 0.02 s\n", ("seconds",), "a 2 in 0.35 s\n", "a 1 in 0.02 s"),
        ("a 1  0.02\n", ("last",), "a 2    0.35\n", "a 1  0.02"),
        ("a 1 in 0.02 s\n", ("numbers",), "b 2 in 0.35 s\n", "a 1 in 0.02 s"),
        ("sha256:0123456789abcdef\n", ("numbers",), "sha256:0123456789abcdee\n", "sha256:0123456789abcdef"),
    ):
        assert first_lost(block._replace(shows=shows, varies=varies), printed) == lost, (shows, varies)
    shown = block._replace(shows="a 1\nd 4\n\nb sha256:0123456789abcdef\n")
    assert updated(shown, "a 7\nb 1\nb sha256:fedcba9876543210\n") == "a 7\nd 4\n\nb sha256:fedcba9876543210\n"


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
