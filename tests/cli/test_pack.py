"""`grain-sft pack` prints the figures of a packing, and compares those of all algorithms."""

import functools
from pathlib import Path

import numpy as np
import pytest
from sft_files import EOS, documents, write_episodes

import grain_sft
from grain_sft.layout import ALGORITHMS, compare_algorithms
from grain_sft.pipeline import layout_receipt
from grain_sft.replay.learning_rate import automatic_learning_rate, supervised_ratio

LENGTH = 64


@pytest.fixture
def chats(tmp_path):
    return write_episodes(tmp_path / "chats", documents(200, longest=90))


@pytest.fixture
def packed(figures):
    return functools.partial(figures, "pack", "--sequence-length", LENGTH)


def counted(layout):
    whole = layout.corpus.documents.length
    spans = [layout.spans(row) for row in range(len(layout))]
    found, pieces = np.zeros(len(whole), np.int64), np.zeros(len(whole), np.int64)
    for span in (span for row in spans for span in row):
        found[span.document] += span.stop - span.start
        pieces[span.document] += 1
    segments = [len(row) for row in spans]
    cut, dropped, size = (found > 0) & (found < whole), found == 0, len(layout) * LENGTH
    mean = pytest.approx(np.mean(segments))
    return {
        **{"rows": len(layout), "tokens": found.sum(), "documents": len(whole)},
        **{"padding": size - found.sum(), "padding_share": pytest.approx(1 - found.sum() / size)},
        **{"truncated_documents": cut.sum(), "truncated_tokens": (whole - found)[cut].sum()},
        **{"dropped_documents": dropped.sum(), "dropped_tokens": whole[dropped].sum()},
        "split_documents": (pieces > 1).sum(),
        "segments_a_row": {"mean": mean, "median": np.median(segments), "max": max(segments)},
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_figures_are_those_counted_in_the_rows(chats, tmp_path, packed, algorithm):
    options = {"long_documents": "fragment", "seed": 5, "batch_rows": 3, "ties": "numpy"}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    found, printed = packed(chats, "--algorithm", algorithm, *words)
    layout = grain_sft.PackedLayout(grain_sft.open_corpus(chats), LENGTH, algorithm=algorithm, **options)
    expected = counted(layout)
    assert {key: found["packing"][key] for key in expected} == expected
    assert f"rows          {len(layout):,} of 64 tokens" in printed and "algorithms" not in found
    assert found["packing"]["receipt"] == layout_receipt(layout) and layout_receipt(layout) in printed
    (plan,) = found["packing"]["plans"]
    assert plan["fingerprint"] in printed and plan["path"] in printed
    assert Path(plan["path"]).is_file() and Path(plan["path"]).is_relative_to(tmp_path / "cache")


def test_without_an_algorithm_all_are_compared_and_no_plan_is_kept(chats, tmp_path, packed):
    found, printed = packed(chats, "--batch-rows", 2, "--max-segments", 3)
    assert [row["algorithm"] for row in found["algorithms"]] == list(ALGORITHMS)
    for row in found["algorithms"]:
        assert row["algorithm"] in printed and row["rows"] > 0 and row["seconds"] > 0
        bounded = row["algorithm"] not in ("multipack", "concat_then_split")
        assert (row["segments_a_row"]["max"] <= 3) == bounded
    assert "multipack x 2" in printed and "packing" not in found and not (tmp_path / "cache" / "plans").exists()


def test_an_algorithm_that_is_registered_later_is_compared_too(chats, monkeypatch):
    later = {"best_fit_decreasing": ALGORITHMS["best_fit_decreasing"]}
    monkeypatch.setattr("grain_sft.layout.report.ALGORITHMS", later)
    (found,) = compare_algorithms(grain_sft.open_corpus(chats), LENGTH, {})
    assert found["algorithm"] == "best_fit_decreasing" and found["rows"] > 0


def test_compare_adds_all_algorithms_to_the_packing_of_one(chats, packed):
    found, _ = packed(chats, "--algorithm", "shuffled_best_fit", "--epochs", 2, "--compare")
    assert found["packing"]["epochs"] == 2 and len(found["packing"]["plans"]) == 2
    assert found["packing"]["documents"] == 400
    assert {row.get("epochs") for row in found["algorithms"]} == {1}
    named = "grain_sft.layout.packing.balanced:BALANCED"
    found, _ = packed(chats, "--algorithm", named, "--compare")
    assert [row["algorithm"] for row in found["algorithms"]] == [*ALGORITHMS, named]


def test_an_algorithm_that_leaves_no_row_stays_in_the_table(chats, packed):
    found, printed = packed(chats, "--batch-rows", 1000)
    errors = {row["algorithm"]: row["error"] for row in found["algorithms"] if "error" in row}
    assert list(errors) == ["multipack"] and "multipack leaves no row" in printed


def test_a_comparison_in_which_every_algorithm_fails_is_a_failure(chats, run_command):
    printed = run_command("pack", chats, "--sequence-length", 2**31, status=1).out
    assert printed.count("expected less than 2**31") == len(ALGORITHMS)


def test_the_learning_rate_is_printed_only_for_a_given_batch(chats, packed):
    corpus = grain_sft.open_corpus(chats)
    arguments = [chats, "--algorithm", "best_fit_decreasing"]
    found, printed = packed(*arguments)
    assert found["learning_rate"] == {"supervised_ratio": supervised_ratio(corpus)} and "learning rate" not in printed
    rate = automatic_learning_rate(corpus, 4096, 8, "mistral")
    found, printed = packed(*arguments, "--batch-tokens", 4096, "--ranks", 8, "--model-type", "Mistral")
    assert found["learning_rate"]["learning_rate"] == rate
    assert f"learning rate {rate:.4e}, OpenChat's for batches of 32,768 tokens" in printed


def test_files_of_tokens_are_packed_by_their_eos(write_tokens, packed, run_command):
    paths = [write_tokens(f"{name}.npy", [5, 6, EOS, 7, EOS, 8, 9], "uint16") for name in "ab"]
    words = ["--dtype", "uint16", "--eos-token-id", EOS, "--algorithm", "best_fit_decreasing"]
    found, printed = packed(*paths, *words, "--source-group-size", 2)
    assert (found["corpus"]["documents"], found["corpus"]["tokens_in_documents"]) == (4, 10)
    assert found["packing"]["rows"] == 1 and "4 tokens are in no document" in printed
    error = run_command("pack", *paths, *words[:2], "--eos-token-id", 0, "--sequence-length", LENGTH, status=1).err
    assert "no document has a token" in error and "Check its eos_token_id." in error


def test_options_that_are_wrong_missing_or_incompatible_are_refused(chats, run_command):
    for words, status, message in (
        ("--sequence-length 64 --algorithm multipack --max-segments 2", 1, "can't limit the documents of a row"),
        ("--sequence-length 64 --algorithm multipack --batch-rows 9000", 1, "leaves no row"),
        ("--sequence-length 64 --algorithm multipack --materialize=", 1, "the output is an empty name"),
        ("", 2, "--sequence-length"),
        ("--sequence-length 0", 2, "--sequence-length"),
        ("--sequence-length 8 --algorithm best", 2, "--algorithm"),
        ("--sequence-length 8 --materialize out", 2, "--materialize needs --algorithm. Give both, or neither."),
        ("--sequence-length 8 --algorithm multipack --shard-bytes 9", 2, "--shard-bytes needs --materialize"),
        ("--sequence-length 8 --ranks 8", 2, "--ranks needs --batch-tokens"),
        ("--sequence-length 8 --model-type mistral", 2, "--model-type needs --batch-tokens"),
    ):
        assert message in run_command("pack", chats, *words.split(), status=status).err, words
