"""`grain-sft inspect` prints the tokens, sources and loss that the pipeline gives for a row."""

import contextlib
import dataclasses
import itertools
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest
from batches import SHIFTED, Applies, load, pipeline_of, sections, write_config

from grain_sft import Host, Pipeline, ShiftTargets, WindowLayout
from grain_sft.errors import PipelineError
from grain_sft.layout import MegatronGptLayout
from grain_sft.pipeline import Amendment
from grain_sft.transforms import ResetAtEod
from grain_sft.view.rows import describe_origin, segment_runs, view_rows
from grain_sft.view.terminal import row_lines
from grain_sft.view.text import TokenTexts, columns, visible


@pytest.mark.parametrize("transforms", [["ngram_filter", "shift_targets"], ["shift_targets"], ["ngram_filter"]])
@pytest.mark.parametrize("layout", [{}, {"sequence_length": 100}, {"kind": "padded", "sequence_length": 128}])
def test_a_view_of_a_row_has_the_values_of_the_batch(config, layout, transforms):
    pipeline = load(config(layout=layout, transforms=transforms))
    names = ("tokens", "segment_ids", "positions", "loss_mask")
    if "shift_targets" in transforms:
        names = ("inputs", "inputs_segmentation", "inputs_position", "targets_segmentation")
    for step in (0, 3):
        for row, view in enumerate(view_rows(pipeline, step)):
            assert (view.row, view.step, view.weights) == (row, step, None)
            *expected, loss = (pipeline[step][name][row] for name in names)
            if "shift_targets" in transforms:
                loss = np.append(False, loss[:-1] != 0)
            np.testing.assert_equal([view.tokens, view.segments, view.positions, view.loss], [*expected, loss])


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


class OutsideDocuments(WindowLayout):
    """Windows whose tokens are outside all documents."""

    follows_documents = True

    def pieces(self, rows):
        pieces = super().pieces(rows)
        return pieces._replace(document=np.full_like(pieces.row, -1))


def test_tokens_outside_all_documents_are_shown_without_a_source(pipeline):
    (piece, *_) = view_rows(pipeline_of(OutsideDocuments(pipeline.source.layout.corpus, 64)), 0)[0].pieces
    assert (piece.document, piece.source, piece.record) == (None, "", None)


def test_a_mixture_is_shown_with_records_in_words_and_with_padding_without_an_epoch(run):
    """Amendments read "chat:7" as document 7 of the source chat, so record 7 must not look like that."""
    mixture = {"chat": {"path": str(run.parent / "chats"), "weight": 1, "sampler": {"epochs": 1}}}
    sampler = {"global_batch_size": 7, "last_batch": "fill", "on_exhausted": "stop"}
    pipeline = load(sections(None, 512, corpus={"mixture": mixture}, **sampler))
    piece = view_rows(pipeline, 0)[0].pieces[0]
    assert pipeline.source.layout.corpus.tokenizer_sha256 == load(run).source.layout.corpus.tokenizer_sha256 is not None
    assert f" of {piece.source}, record {piece.record}, tokens " in describe_origin(piece)
    view = view_rows(pipeline, len(pipeline) - 1)[-1]
    heading = next(row_lines(view, TokenTexts(None), colour=False, width=80))
    assert (view.epoch, heading) == (-1, f"step {len(pipeline) - 1}, row 6, of padding alone")


def test_the_target_of_the_last_input_is_shown_where_it_takes_loss(config):
    layout = {"kind": "padded", "sequence_length": 65}
    pipeline = load(config(transforms=["shift_targets", "drop_last_position"], layout=layout))
    batch = pipeline[0]
    assert batch["targets_segmentation"][:, -1].any()
    for row, view in enumerate(view_rows(pipeline, 0)):
        taken = batch["targets_segmentation"][row]
        np.testing.assert_array_equal(view.loss[1:], taken if taken[-1] else taken[:-1])
        assert len(view.tokens) == 64 + bool(taken[-1]) == len(view.positions)
        if taken[-1]:
            assert (view.tokens[-1], view.positions[-1]) == (batch["targets"][row, -1], 64)
        assert not [note for note in view.notes if "segment" in note]


def test_rows_of_each_host_have_their_slot_and_rows_of_padding_are_called_padding(config):
    path = config(sampler={"global_batch_size": 4, "last_batch": "fill", "epochs": 1, "order": "shuffle"})
    last = len(load(path)) - 1
    whole = view_rows(load(path), last)
    for host in (0, 1):
        for mine in view_rows(load(path, host=Host(host, 2)), last):
            same = whole[mine.slot]
            assert (mine.slot, mine.instance) == (host + 2 * mine.row, same.instance)
            np.testing.assert_array_equal(mine.tokens, same.tokens)
    filled = next(view for view in whole if view.instance < 0)
    lines = list(row_lines(filled, TokenTexts(None), colour=False, width=80))
    assert "of padding alone" in lines[0] and lines[-1].startswith("padding: 512 tokens")


def test_a_batch_that_a_transform_has_changed_is_noted(pipeline):
    def views(change, before=SHIFTED):
        def changed(element):
            batch = {name: array.copy() for name, array in element.items()}
            change(batch)
            return batch

        return view_rows(Pipeline(pipeline.source, pipeline.sampler, [*before, Applies(changed)]), 0)

    at = np.flatnonzero(pipeline[0]["targets_segmentation"][0])[3]
    changed = views(lambda batch: batch["targets"].__setitem__((0, at), 77))
    assert f"the target of input {at} is 77" in changed[0].notes[0]
    changed = views(lambda batch: batch["inputs_segmentation"].__setitem__((0, slice(5)), 2))
    assert "segment 1 has" in changed[0].notes[0]
    added = {"weight": np.float32(1), "borders": np.zeros(1)}
    assert views(lambda batch: batch.update(added | {name: batch.pop(name) for name in list(batch)}))[0].notes == ()
    assert views(lambda batch: batch.update(targets=batch["tokens"]), before=())[0].notes == ()
    for change, message in (
        (lambda batch: batch.pop("targets"), "expected those of ShiftTargets"),
        (dict.clear, "step 0: the batch is {}; expected a dict of arrays"),
        (lambda batch: batch.update(inputs=batch["inputs"].tolist()), "step 0: 'inputs' of the batch is a list"),
        (lambda batch: batch.update(inputs=batch["inputs"][:, 1:]), "inputs, .* have different lengths"),
    ):
        with pytest.raises(PipelineError, match=message):
            views(change)


def test_withdrawn_tokens_of_a_window_are_counted_and_not_noted_as_a_change_by_a_transform(pipeline, texts):
    corpus = pipeline.source.layout.corpus
    amendments = [Amendment(0, withdraw=range(0, corpus.num_documents, 2))]

    def views(layout, *transforms):
        run, transforms = {"amendments": amendments}, [ShiftTargets(), *transforms]
        return view_rows(pipeline_of(layout, transforms, run=run, global_batch_size=len(layout)), 0)

    partly = 0
    for view in views(WindowLayout(corpus, 512), ResetAtEod(corpus.eos_token_id)):
        assert not [note for note in view.notes if "a transform changed" in note]
        for piece in view.pieces:
            assert piece.withdrawn == (0 if piece.segment else piece.stop - piece.start)
        partly += len({piece.segment == 0 for piece in view.pieces}) == 2
    assert partly
    for view in views(MegatronGptLayout(corpus, 512)):  # several documents of a segment are each described once
        lines = [line for line in row_lines(view, texts, colour=False, width=80) if line.startswith("  document")]
        assert lines == [f"  {describe_origin(piece)}" for piece in view.pieces if not piece.withdrawn]


@pytest.mark.parametrize(("kind", "padding"), [("packed", False), ("padded", True)])
def test_rows_that_the_filter_rejects_have_a_note(config, kind, padding):
    filters = [{"ngram_filter": {"max_count": 1000}}, {"ngram_filter": {"count_padding": padding}}]
    transforms = [*filters, "shift_targets", {"trim_to_multiple": {"multiple": 8}}]
    pipeline = load(config(transforms=transforms, layout={"kind": kind, "sequence_length": 300}))
    flagged = 0
    for view in (view for step in range(4) for view in view_rows(pipeline, step)):
        row = pipeline.source.read([view.instance])
        (rejects,) = pipeline.transforms[1].fails(row["tokens"], row["segment_ids"])
        assert rejects == any("NgramFilter" in note for note in view.notes) and not (rejects and view.loss.any())
        flagged += rejects
    assert flagged


def visible_text(tokens, texts):
    """Return the visible text of tokens. Their bytes are joined first, since two tokens may share a character."""
    return visible("".join(map(texts.text, tokens.tolist())).encode("utf-8", "surrogateescape").decode())


@pytest.mark.parametrize("width", [30, 80, 200])
def test_lines_fit_the_terminal_and_hold_every_token(pipeline, texts, width):
    for view, first in itertools.product(view_rows(pipeline, 1), (0, 10**6)):
        expected = re.sub("[⟦⟧◌]", "", visible_text(view.tokens[view.segments != 0], texts))
        view = dataclasses.replace(view, positions=view.positions + first)
        for colour in (False, True):
            lines = list(row_lines(view, texts, colour=colour, width=width))
            bare = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
            rows = [line for line in bare if re.match(r" *[\d,]+ │ ", line)]
            assert all(columns(line) <= width for line in rows)
            shown = "".join(line.split("│ ", 1)[1] for line in rows).replace("‿", "")
            assert re.sub("[⟦⟧◌]", "", shown) == expected
            assert not any("\x1b" in line for line in bare)
            assert all(line.count("\x1b[0m") * 2 == line.count("\x1b") for line in lines)


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


def test_the_command_prints_one_row(run, pipeline, texts, run_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    (view,) = view_rows(pipeline, 1, [2])
    for colour in (False, True):
        words = ["--step", "1", "--row", "2", "--colour", "always" if colour else "auto"]
        printed = run_command("inspect", run, *words).out
        assert printed.splitlines() == "\n".join(row_lines(view, texts, colour=colour, width=60)).splitlines()
        assert ("\x1b[" in printed) == colour and "two & <b>.jsonl:" in printed


def test_without_a_tokenizer_ids_are_shown(write_tokens, tmp_path, run_command):
    tokens = write_tokens("tokens.npy", np.arange(500) % 97, "uint16")
    config = sections(tokens, 64, corpus={"dtype": "uint16"}, layout="windows")
    printed = run_command("inspect", write_config(tmp_path / "windows.json", config), "--step", "0")
    assert "Give --tokenizer" in printed.err and "tokens.npy" in printed.out
    assert re.findall(r"⟨(\d+)⟩", printed.out) == list(map(str, load(config)[0]["inputs"][0].tolist()))


def test_wrong_steps_rows_tokenizers_and_hosts_are_errors(run, run_command):
    for arguments, words in (
        ("--step 100000", "expected 0 to"),
        ("--step 0 --row 4", "row 4 of step 0: expected 0 to 3"),
        ("--step 0 --tokenizer nowhere", "nowhere: no such file"),
        ("--step 0 --host 0/3", "3 hosts"),
    ):
        assert words in run_command("inspect", run, *arguments.split(), status=1).err


def test_colours_are_printed_only_on_terminals_without_no_color_and_any_encoding_works(run):
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "grain_sft.cli.main", "inspect", str(run), "--step", "0"]

    def on_terminal(**more):
        ours, theirs = pty.openpty()
        with subprocess.Popen(command, stdout=theirs, env=environment | {"TERM": "xterm"} | more) as process:
            os.close(theirs)
            found = b""
            with contextlib.suppress(OSError):  # raised when the command has closed the terminal
                while True:
                    found += os.read(ours, 1 << 16)
        os.close(ours)
        assert process.returncode == 0
        return found

    assert b"\x1b[" in on_terminal()
    assert b"\x1b" not in on_terminal(NO_COLOR="1")
    done = subprocess.run(command, capture_output=True, env=environment | {"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stderr) == (0, b"") and rb"\u2502" in done.stdout and b"\x1b" not in done.stdout
