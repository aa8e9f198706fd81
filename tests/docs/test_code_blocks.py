"""Every code block of the documentation and of the README runs, in order, and prints what the page shows."""

import os
import re

import doc_pages as pages
import pytest
from page_folders import Folders, first_lost, updated

README = "../README.md"
MOST_NOT_RUN = dict.fromkeys(("contributing.md", "index.md", "preparing.md", "text.md", "tutorial.md"), 1)
MOST_NOT_RUN |= {"cloud.md": 6, "maxtext.md": 10, "tunix.md": 3}
"""How many blocks of a page may have a reason not to run: they install the package, or need a bucket, a pod or a trainer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("docs"))


RUN = [page for page in (README, *pages.PAGES) if any(each.runs for each in pages.blocks(page))]


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
    (output,) = (output for block, output in folders.run(README) if block.text.startswith("python train.py 20 | tee"))
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
