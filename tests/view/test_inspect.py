"""Rows as text on the terminal: what is shown is what the pipeline gives."""

import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
from batches import sections, write_config

from grain_sft import Host, load
from grain_sft.cli.main import main
from grain_sft.errors import PipelineError
from grain_sft.view.rows import segment_runs, view_rows
from grain_sft.view.terminal import row_lines
from grain_sft.view.text import TokenTexts, columns, visible

HOST = Host(0, 1)


@pytest.fixture
def weighted(write_tokens, tmp_path):
    """Config of plain windows without documents, and no tokenizer."""
    tokens = write_tokens("tokens.npy", np.arange(500) % 97, "uint16")
    options = {"layout": "windows", "order": "shuffle", "global_batch_size": 3, "epochs": 1}
    return write_config(tmp_path / "windows.json", sections(tokens, 64, corpus={"dtype": "uint16"}, **options))


@pytest.mark.parametrize("transforms", [["ngram_filter", "shift_targets"], ["shift_targets"], ["ngram_filter"]])
@pytest.mark.parametrize("layout", [{}, {"sequence_length": 100}, {"kind": "padded", "sequence_length": 128}])
def test_a_view_is_the_batch(config, layout, transforms):
    pipeline = load(config(layout=layout, transforms=transforms), host=HOST)
    names = ("tokens", "segment_ids", "positions", "loss_mask")
    if "shift_targets" in transforms:
        names = ("inputs", "inputs_segmentation", "inputs_position", "targets_segmentation")
    for step in (0, 3):
        batch = pipeline[step]
        for row, view in enumerate(view_rows(pipeline, step)):
            assert (view.row, view.step, view.weights) == (row, step, None)
            *expected, loss = (batch[name][row] for name in names)
            if "shift_targets" in transforms:
                loss = np.append(False, loss[:-1] != 0)
            shown = (view.tokens, view.segments, view.positions, view.loss)
            for column, values in zip(shown, (*expected, loss), strict=True):
                np.testing.assert_array_equal(column, values)


def test_sources_and_records_are_those_of_the_documents(pipeline):
    corpus = pipeline.source.layout.corpus
    for view in view_rows(pipeline, 2):
        pieces = {piece.segment: piece for piece in view.pieces}
        for segment, first, stop in segment_runs(view):
            if segment:
                piece = pieces[segment]
                source, record = corpus.sources[piece.document]
                assert (piece.source, piece.record) == (corpus.source_names[source], record)
                tokens = corpus.document(piece.document).tokens[: stop - first]
                np.testing.assert_array_equal(view.tokens[first:stop], tokens)


def test_the_target_of_the_last_input_is_shown_where_it_takes_loss(config):
    layout = {"kind": "padded", "sequence_length": 65}
    pipeline = load(config(transforms=["shift_targets", "drop_last_position"], layout=layout), host=HOST)
    batch = pipeline[0]
    assert batch["targets_segmentation"][:, -1].any()
    for row, view in enumerate(view_rows(pipeline, 0)):
        taken = batch["targets_segmentation"][row]
        np.testing.assert_array_equal(view.loss[1:], taken if taken[-1] else taken[:-1])
        assert len(view.tokens) == 64 + bool(taken[-1]) == len(view.positions)
        if taken[-1]:
            assert (view.tokens[-1], view.positions[-1]) == (batch["targets"][row, -1], 64)
        assert not [note for note in view.notes if "segment" in note]


def test_rows_of_hosts_are_told_apart_and_padding_rows_are_said(config):
    path = config(sampler={"global_batch_size": 4, "last_batch": "fill", "epochs": 1, "order": "shuffle"})
    last = len(load(path, host=HOST)) - 1
    whole = view_rows(load(path, host=HOST), last)
    for host in (0, 1):
        for mine in view_rows(load(path, host=Host(host, 2)), last):
            same = whole[mine.slot]
            assert (mine.slot, mine.instance) == (host + 2 * mine.row, same.instance)
            np.testing.assert_array_equal(mine.tokens, same.tokens)
    filled = next(view for view in whole if view.instance < 0)
    lines = list(row_lines(filled, TokenTexts(None), colour=False, width=80))
    assert "of padding alone" in lines[0] and lines[-1].startswith("padding: 512 tokens")


def test_a_changed_batch_is_noted(pipeline):
    class Changed:
        def __init__(self, change):
            self.change = change

        def __getattr__(self, name):
            return getattr(pipeline, name)

        def __getitem__(self, step):
            batch = {name: array.copy() for name, array in pipeline[step].items()}
            self.change(batch)
            return batch

    at = np.flatnonzero(pipeline[0]["targets_segmentation"][0])[3]
    changed = Changed(lambda batch: batch["targets"].__setitem__((0, at), 77))
    assert "its id is 77" in view_rows(changed, 0)[0].notes[0]
    changed = Changed(lambda batch: batch["inputs_segmentation"].__setitem__((0, slice(5)), 2))
    assert "segment 1 has" in view_rows(changed, 0)[0].notes[0]
    with pytest.raises(PipelineError, match="expected those of ShiftTargets"):
        view_rows(Changed(lambda batch: batch.pop("targets")), 0)


def test_rows_that_the_filter_rejects_say_so(config):
    pipeline = load(config(transforms=["ngram_filter", "shift_targets"], layout={"sequence_length": 300}), host=HOST)
    flagged = 0
    for step in range(4):
        for view in view_rows(pipeline, step):
            (rejects,) = pipeline.transforms[0].fails(view.tokens[np.newaxis], view.segments[np.newaxis])
            assert rejects == any("NgramFilter" in note for note in view.notes)
            assert not (rejects and view.loss.any())
            flagged += rejects
    assert flagged


def visible_text(tokens, texts):
    """The visible text of tokens, their characters whole."""
    joined = "".join(map(texts.text, tokens.tolist()))
    return visible(joined.encode("utf-8", "surrogateescape").decode())


@pytest.mark.parametrize("width", [30, 80, 200])
def test_lines_fit_the_terminal_and_hold_every_token(pipeline, texts, width):
    for view in view_rows(pipeline, 1):
        lines = list(row_lines(view, texts, colour=False, width=width))
        rows = [line.split("│ ", 1) for line in lines if re.match(r" *[\d,]+ │ ", line)]
        assert all(columns("│ ".join(line)) <= width for line in rows)
        shown = "".join(text for _, text in rows).replace("‿", "")
        expected = visible_text(view.tokens[view.segments != 0], texts)
        assert re.sub("[⟦⟧◌]", "", shown) == re.sub("[⟦⟧◌]", "", expected)
        coloured = list(row_lines(view, texts, colour=True, width=width))
        bare = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in coloured]
        assert not any("\x1b" in line for line in bare)
        assert all(columns(line) <= width for line in bare if re.match(r" *[\d,]+ │ ", line))
        for line in coloured:
            assert line.count("\x1b[0m") * 2 == line.count("\x1b")


def test_tokens_that_take_loss_are_in_brackets_or_bright(pipeline, texts):
    (view,) = view_rows(pipeline, 0, [0])
    lines = list(row_lines(view, texts, colour=True, width=10_000))
    tokens = [each for line in lines if " │ " in line for each in re.findall(r"\x1b\[([\d;]*)m[^\x1b]+", line)]
    real = view.segments != 0
    assert len(tokens) == real.sum()
    assert [not code.startswith("2;") for code in tokens] == view.loss[real].tolist()
    special = [texts.is_special(each) for each in view.tokens[real].tolist()]
    assert [code.endswith(";7") for code in tokens] == special
    colours = [int(code.removeprefix("2;").split(";")[0]) for code in tokens]
    assert [(colour == colours[0]) for colour in colours[:200]] == ((view.segments[real][:200] - 1) % 6 == 0).tolist()
    plain = [line.split(" │ ", 1)[1] for line in row_lines(view, texts, colour=False, width=10_000) if " │ " in line]
    inside = "".join(part for line in plain for part in re.findall("⟦([^⟧]*)", line.replace("'⟦·⟧·", "")))
    expected = visible_text(view.tokens[view.loss], texts).replace("'⟦·⟧·", "")
    assert inside.replace("‿", "") == expected


def test_the_command_prints_one_row(run, pipeline, texts, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["inspect", str(run), "--step", "1", "--row", "2"]) == 0
    printed = capsys.readouterr().out
    (view,) = view_rows(pipeline, 1, [2])
    assert printed.splitlines() == "\n".join(row_lines(view, texts, colour=False, width=60)).splitlines()
    assert "\x1b" not in printed and "two & <b>.jsonl:" in printed
    assert main(["inspect", str(run), "--step", "1", "--row", "2", "--colour", "always"]) == 0
    assert "\x1b[" in capsys.readouterr().out


def test_without_a_tokenizer_ids_are_shown(weighted, capsys):
    assert main(["inspect", str(weighted), "--step", "0"]) == 0
    captured = capsys.readouterr()
    assert "Give --tokenizer" in captured.err
    batch = load(weighted, host=HOST)[0]
    assert re.findall(r"⟨(\d+)⟩", captured.out) == [str(each) for each in batch["inputs"][0].tolist()]
    assert "tokens.npy" in captured.out


ERRORS = {
    **{"--step 100000": "expected 0 to", "--step 0 --row 4": "row 4 of step 0: expected 0 to 3"},
    **{"--step 0 --tokenizer nowhere": "nowhere: no such file", "--step 0 --host 0/3": "3 hosts"},
}


@pytest.mark.parametrize(("arguments", "words"), ERRORS.items())
def test_what_cannot_be_shown_is_an_error(run, arguments, words, capsys):
    assert main(["inspect", str(run), *arguments.split()]) == 1
    assert words in capsys.readouterr().err


def test_colours_are_for_terminals_that_want_them_and_any_encoding_is_printed(run):
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "grain_sft.cli.main", "inspect", str(run), "--step", "0"]

    def on_terminal(**more):
        ours, theirs = pty.openpty()
        with subprocess.Popen(command, stdout=theirs, env=environment | {"TERM": "xterm"} | more) as process:
            os.close(theirs)
            found = b""
            while True:
                try:
                    found += os.read(ours, 1 << 16)
                except OSError:
                    break
        os.close(ours)
        assert process.returncode == 0
        return found

    assert b"\x1b[" in on_terminal()
    assert b"\x1b" not in on_terminal(NO_COLOR="1")
    done = subprocess.run(command, capture_output=True, env=environment | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"") and rb"\u2502" in done.stdout and b"\x1b" not in done.stdout
