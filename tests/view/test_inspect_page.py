"""The page of `inspect --html` shows the batches of the pipeline, also in a real browser.

The two responses of a preference pair are next to each other, on the terminal too.
"""

import base64
import re
import sys

import numpy as np
import pytest
from batches import Applies, load, pipeline_of, sections, write_config
from report_tables import data_of
from sft_files import make_pairs, write_pairs

from grain_sft import ShiftTargets, WindowLayout, open_corpus
from grain_sft.cli.main import main
from grain_sft.errors import RowIndexError, SamplerError, WrongTypeError
from grain_sft.provenance import difference
from grain_sft.simulate import simulate
from grain_sft.view import inspect_page, make_report, row_lines
from grain_sft.view.report import packing
from grain_sft.view.rows import describe_origin, segment_runs, view_rows
from grain_sft.view.text import TokenTexts, columns, shown_texts, visible

STEP = 2


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "rows.html"
    assert main(["inspect", str(run), "--step", str(STEP), "--html", str(path)]) == 0
    return path


def decoded(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


def columns_of(row):
    """Return tokens, segments, positions and loss of a row, decoded from the page's data."""
    count, positions = row["length"], np.zeros(row["length"], np.int64)
    tokens = decoded(row["ids"], {2: "<u2", 4: "<i4"}[row["width"]])
    segments = np.concatenate([np.full(stop - first, segment) for segment, first, stop in row["segments"]])
    for at, position in row["positions"]:
        positions[at:] = position + np.arange(count - at)
    return tokens, segments, positions, np.unpackbits(decoded(row["loss"], np.uint8), bitorder="little")[:count]


def test_the_page_holds_the_arrays_and_sources_of_three_steps(page, pipeline, texts):
    data = data_of(page)
    assert [step["step"] for step in data["steps"]] == [STEP - 1, STEP, STEP + 1] and data["at"] == 1
    assert data["receipt"] == pipeline.receipt.code
    ids = data["pieces"]["ids"]
    assert dict(zip(ids, data["pieces"]["shown"], strict=True)) == {each: visible(texts.text(each)) for each in ids}
    assert data["pieces"]["special"] == [each for each in ids if texts.is_special(each)]
    for step in data["steps"]:
        batch = pipeline[step["step"]]
        for row, (entry, view) in enumerate(zip(step["rows"], view_rows(pipeline, step["step"]), strict=True)):
            expected = [batch[key][row] for key in ("inputs", "inputs_segmentation", "inputs_position")]
            loss = np.append(False, batch["targets_segmentation"][row, :-1] != 0)
            for column, values in zip(columns_of(entry), [*expected, loss], strict=True):
                np.testing.assert_array_equal(column, values)
            assert set(view.tokens.tolist()) <= set(ids)
            assert [piece["words"] for piece in entry["pieces"]] == [describe_origin(piece) for piece in view.pieces]
            assert (entry["row"], entry["slot"], entry["instance"]) == (row, view.slot, view.instance)
            assert entry["weights"] is None


def test_no_text_becomes_markup_and_the_page_needs_no_network(page):
    written = page.read_text()
    assert len(re.findall(r"<script", written)) == len(re.findall(r"</script>", written)) == 2
    assert "<img" not in written and "\x1b" not in written and "\u202e" not in written
    assert not re.findall(r"https?://|url\(|@import|src=|href=", written)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', written)
    assert "default-src 'none'" in policy and re.search(r"script-src 'sha256-[\w+/=]+'", policy)


def test_a_page_of_the_first_or_last_step_has_one_neighbour(run, pipeline, tmp_path):
    last = len(pipeline) - 1
    for step, expected in ((0, [0, 1]), (last, [last - 1, last])):
        path = tmp_path / f"{step}.html"
        assert main(["inspect", str(run), "--step", str(step), "--row", "3", "--html", str(path)]) == 0
        data = data_of(path)
        assert [each["step"] for each in data["steps"]] == expected
        assert data["steps"][data["at"]]["step"] == step
        assert [row["row"] for each in data["steps"] for row in each["rows"]] == [3, 3]


def test_the_first_step_of_a_stage_has_a_page_and_rows_that_do_not_exist_are_refused(config, pipeline):
    path = config(stages=[{"steps": 3}, {"steps": 3, "sampler": {"seed": 4}}])
    assert "Step 3" in inspect_page(load(path).stages[1], 3, TokenTexts(None))
    with pytest.raises(RowIndexError, match="at least one row"):
        inspect_page(pipeline, 0, TokenTexts(None), rows=[])
    for message, step, row in (("row -1", 3, -1), ("row True", 3, True), ("item is 1.5", 3, 1.5), ("step=1.5", 1.5, 0)):
        with pytest.raises((RowIndexError, WrongTypeError), match=message):
            inspect_page(pipeline, step, TokenTexts(None), rows=[row])


def test_a_page_of_too_many_tokens_has_only_the_first_rows(pipeline, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["grain_sft.view.inspect_page"], "MOST_TOKENS", 2 * 3 * 512 + 5)
    path = tmp_path / "some.html"
    path.write_text(inspect_page(pipeline, STEP, texts))
    assert [len(step["rows"]) for step in data_of(path)["steps"]] == [2, 2, 2]
    assert {step["rows_of_batch"] for step in data_of(path)["steps"]} == {4}


def test_a_page_shows_steps_of_a_mixture_whose_batches_change_in_size(mixture, tmp_path, browser):
    pipeline, path = load(mixture), tmp_path / "mixture.html"
    assert main(["inspect", str(mixture), "--step", "1", "--html", str(path)]) == 0
    steps = data_of(path)["steps"]
    sizes = [(step["step"], step["rows_of_batch"], len(step["rows"])) for step in steps]
    assert sizes == [(0, 6, 6), (1, 6, 6), (2, 3, 3)]
    for step in steps:
        batch = pipeline[step["step"]]
        parts = pipeline.source.layout.parts_of(pipeline.sampler.rows(step["step"]))
        for row, entry in enumerate(step["rows"]):
            np.testing.assert_array_equal(columns_of(entry)[0], batch["inputs"][row])
            assert all(piece["source"].startswith(("chats", "web")[parts[row]]) for piece in entry["pieces"])
    browser.open(path)
    browser.press(*"jjjjjn")
    assert browser.run("return document.documentElement.dataset.shown") == "2/2/all"
    for option in (("--row", "5"), ("--host", "1/2")):  # step 2 has 3 rows: no row 5, and not divided by 2 hosts
        assert main(["inspect", str(mixture), "--step", "1", *option, "--html", str(path)]) == 0
        assert [step["step"] for step in data_of(path)["steps"]] == [0, 1]
    assert browser.console() == []


def test_a_page_shows_loss_weights_and_four_byte_ids_without_texts(write_tokens, tmp_path, browser):
    rng = np.random.default_rng(0)
    write_tokens("sft/token_ids_part_0000.npy", rng.integers(0, 2**31 - 1, 300), "uint32")
    weights = np.round(rng.random(300), 3).astype(np.float32) * (rng.random(300) < 0.7)
    write_tokens("weights.npy", weights, "float32")

    def weigh(element):
        part = np.resize(weights, (len(element["tokens"]), 50))
        return {**element, "loss_weights": part, "loss_mask": part != 0}

    layout = WindowLayout(open_corpus(tmp_path / "sft", dtype="uint32"), 50)
    pipeline = pipeline_of(layout, [Applies(weigh), ShiftTargets()], global_batch_size=2)
    path, batch = tmp_path / "weights.html", pipeline[1]
    path.write_text(inspect_page(pipeline, 1, TokenTexts(None)))
    for row, entry in enumerate(data_of(path)["steps"][1]["rows"]):
        np.testing.assert_array_equal(decoded(entry["weights"], "<f4")[1:], batch["targets_weights"][row, :-1])
        np.testing.assert_array_equal(columns_of(entry)[0], batch["inputs"][row])
    browser.open(path)
    found = browser.run(
        """return [...document.querySelectorAll('main .t')].map((each) => { each.click(); return [each.textContent,
        each.matches('.l'), +document.querySelector('[data-fact=weight]').textContent]; })"""
    )
    weight = np.append(np.float32(0), batch["targets_weights"][0, :-1])
    assert [text for text, _, _ in found] == [f"⟨{each}⟩" for each in batch["inputs"][0].tolist()]
    assert [each for _, each, _ in found] == (weight != 0).tolist()
    np.testing.assert_allclose([each for _, _, each in found], weight, rtol=1e-5)
    assert browser.console() == []


def tokens_shown(browser):
    """Return [number, text, classes] of every token that the browser shows."""
    return browser.run(
        "return [...document.querySelectorAll('main .t')].map((each) => [+each.dataset.i, each.textContent, each.className])"
    )


def expected_tokens(view, texts, segment=None):
    """Return what `tokens_shown` must return for a row, or for one segment of the row."""
    found = []
    for name, first, stop in segment_runs(view):
        if name and segment in (None, name):
            numbers = view.tokens[first:stop].tolist()
            for at, text in enumerate(shown_texts(numbers, texts)):
                loss, special = view.loss[first + at], texts.is_special(numbers[at])
                found.append([first + at, text, "t" + " l" * bool(loss) + " x" * special])
    return found


def test_keys_and_the_segment_menu_choose_what_a_browser_shows(page, pipeline, texts, browser):
    browser.open(page)
    views = {step: view_rows(pipeline, step) for step in (STEP - 1, STEP, STEP + 1)}
    assert tokens_shown(browser) == expected_tokens(views[STEP][0], texts)
    walk = (("n", STEP + 1, 0), ("jj", STEP + 1, 2), ("pp", STEP - 1, 2), ("k", STEP - 1, 1), ("n", STEP, 1))
    for keys, step, row in walk:
        browser.press(*keys)
        assert browser.run("return document.documentElement.dataset.shown") == f"{step}/{row}/all"
        assert tokens_shown(browser) == expected_tokens(views[step][row], texts)
    for key, segment in (("]", 1), ("]", 2), ("[", 1), ("0", None), ("[", max(views[STEP][1].segments))):
        browser.press(key)
        assert tokens_shown(browser) == expected_tokens(views[STEP][1], texts, segment)
    browser.press("0")
    browser.run("const s = document.getElementById('segment'); s.value = '2'; s.dispatchEvent(new Event('change'))")
    assert tokens_shown(browser) == expected_tokens(views[STEP][1], texts, 2)
    assert browser.run("return document.title") == f"Step {STEP}: run.json"
    assert browser.console() == [] and browser.requests() == [page.absolute().as_uri()]


def test_a_run_ends_before_the_step_for_which_a_source_has_no_row_left(mixture):
    fails = {"mixture": {"chats": {"max_epochs": 1, "on_exhausted": "fail"}}}
    failing = load({"inherits": str(mixture), "corpus": fails, "amendments": [{"skip": {"from": 0, "steps": 2}}]})
    end = failing.sampler.failing_step
    assert make_report(failing, TokenTexts(None))["sampled"]["of"] == end
    staged = {"inherits": str(mixture), "corpus": fails, "sampler": {"schedule": None}, "stages": [{"steps": 9999}, {}]}
    assert make_report(stage := load(staged).stages[0], TokenTexts(None))["sampled"]["of"] == stage.sampler.failing_step
    assert f'"step":{end - 1},' in inspect_page(failing, end - 1, TokenTexts(None))
    assert difference(failing, failing).compared == range(end)
    assert simulate(failing, 1, range(end))["restart"] is None
    with pytest.raises(SamplerError, match=f"stop <= {end}"):
        simulate(failing, 1, range(end + 1))


PAIRS = [[[5, 6], [], [7]], [[], [8, 9], [7]], *make_pairs(6, 1)]


@pytest.fixture
def pairs(tmp_path):
    """Path of a config of preference pairs."""
    write_pairs(tmp_path / "pairs", PAIRS)
    return write_config(tmp_path / "run.json", sections(tmp_path / "pairs", 48, layout="pairs", order="sequential"))


@pytest.mark.parametrize("width", [50, 71, 72, 130])
@pytest.mark.parametrize("colour", [False, True])
def test_the_responses_are_next_to_each_other_if_the_terminal_is_wide_enough(pairs, width, colour):
    pipeline, texts = load(pairs), TokenTexts(None)
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


def test_the_report_does_not_pack_pairs(pairs):
    assert "not packed" in packing(load(pairs))["error"]


def test_the_page_names_the_segments_and_a_browser_shows_the_responses_in_two_columns(pairs, tmp_path, browser, run_command):
    run_command("inspect", pairs, "--step", "0", "--html", tmp_path / "rows.html")
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
