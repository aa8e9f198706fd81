"""`inspect` shows the two responses of a preference pair next to each other, on the terminal and on its HTML page."""

import re

import pytest
from batches import load, sections, write_config
from pair_files import make_pairs, write_pairs
from report_tables import data_of

from grain_sft.view import row_lines, view_rows
from grain_sft.view.report import packing
from grain_sft.view.text import TokenTexts, columns, shown_texts

PAIRS = [[[5, 6], [], [7]], [[], [8, 9], [7]], *make_pairs(6, 1)]


@pytest.fixture
def config(tmp_path):
    write_pairs(tmp_path / "pairs", PAIRS)
    return write_config(tmp_path / "run.json", sections(tmp_path / "pairs", 48, layout="pairs", order="sequential"))


@pytest.mark.parametrize("width", [50, 71, 72, 130])
@pytest.mark.parametrize("colour", [False, True])
def test_the_responses_are_next_to_each_other_if_the_terminal_is_wide_enough(config, width, colour):
    pipeline, texts = load(config), TokenTexts(None)
    for step in range(2):
        for view in view_rows(pipeline, step):
            lines = [*row_lines(view, texts, colour=colour, width=width)]
            bare = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
            tokens = [line for line in bare if " │ " in line]
            assert all(columns(line) <= width for line in tokens)
            sides = [line.split(" ║ ") for line in tokens if " ║ " in line]
            assert bool(sides) == (width >= 72)
            for number, name in enumerate(("chosen", "rejected")):
                assert any(line.startswith(f"segment {number + 2}, {name}: ") for line in bare)
                if sides:
                    cells = "".join(line[number].partition(" │ ")[2] for line in sides)
                    numbers = view.tokens[view.segments == number + 2].tolist()
                    assert cells.translate(str.maketrans("", "", "⟦⟧ ")) == "".join(shown_texts(numbers, texts))


def test_the_report_does_not_pack_pairs(config):
    assert "not packed" in packing(load(config))["error"]


def test_the_page_names_the_segments_and_a_browser_shows_the_responses_in_two_columns(config, tmp_path, browser, run_command):
    run_command("inspect", config, "--step", "0", "--html", tmp_path / "rows.html")
    rows = data_of(tmp_path / "rows.html")["steps"][0]["rows"]
    assert all(row["names"] == ["prompt", "chosen", "rejected"] for row in rows)
    assert rows[0]["segments"][:3] == [[1, 0, 2], [2, 2, 2], [3, 2, 3]]
    assert rows[1]["segments"][:3] == [[1, 0, 0], [2, 0, 2], [3, 2, 3]]
    browser.open(tmp_path / "rows.html")
    browser.set_screen(1200, 800, "light")
    places = "return [...document.querySelectorAll('.sides > section')].map((each) => each.getBoundingClientRect().x)"
    left, right = browser.run(places)
    assert right - left > 300
    browser.set_screen(390, 800, "light")
    assert len(set(browser.run(places))) == 1
    browser.press("]", "]")
    assert browser.run("return document.querySelector('main h2').textContent").startswith("Segment 2, chosen: 0 tokens")
    assert browser.console() == []
