"""`grain-sft pack`: the figures of a packing, and of all algorithms side by side."""

import json
from pathlib import Path

import numpy as np
import pytest
from sft_files import EOS, documents, write_episodes, write_olmo

import grain_sft
from grain_sft.cli.main import main
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.pipeline import layout_receipt
from grain_sft.replay.learning_rate import automatic_learning_rate, supervised_ratio

LENGTH = 64


@pytest.fixture
def chats(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    return write_episodes(tmp_path / "chats", documents(200, longest=90))


def figures(arguments, tmp_path):
    out = tmp_path / "figures.json"
    assert main(["pack", *map(str, arguments), "--output", str(out)]) == 0
    return json.loads(out.read_text())


def counted(layout):
    """The figures of a layout, counted row by row and document by document."""
    corpus = layout.corpus
    held = np.zeros(len(corpus.documents), np.int64)
    pieces = np.zeros(len(corpus.documents), np.int64)
    segments, tokens = [], 0
    for row in range(len(layout)):
        spans = layout.spans(row)
        segments.append(len(spans))
        for span in spans:
            held[span.document] += span.stop - span.start
            pieces[span.document] += 1
            tokens += span.stop - span.start
    whole = corpus.documents.length
    cut = (held > 0) & (held < whole)
    return {
        "rows": len(layout),
        "tokens": tokens,
        "padding": len(layout) * LENGTH - tokens,
        "padding_share": 1 - tokens / (len(layout) * LENGTH),
        "documents": len(whole),
        "truncated_documents": int(cut.sum()),
        "truncated_tokens": int((whole - held)[cut].sum()),
        "dropped_documents": int((held == 0).sum()),
        "dropped_tokens": int(whole[held == 0].sum()),
        "split_documents": int((pieces > 1).sum()),
        "segments_a_row": {
            "mean": pytest.approx(np.mean(segments)),
            "median": np.median(segments),
            "max": max(segments),
        },
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_report_is_of_the_rows_as_they_are(chats, tmp_path, capsys, algorithm):
    options = {"long_documents": "fragment", "seed": 5, "batch_rows": 3, "ties": "numpy"}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    found = figures([chats, "--sequence-length", LENGTH, "--algorithm", algorithm, *words], tmp_path)
    corpus = grain_sft.open_corpus(chats)
    layout = grain_sft.PackedLayout(corpus, LENGTH, algorithm=algorithm, **options)
    expected = counted(layout)
    assert {key: found["packing"][key] for key in expected} == {
        **expected,
        "padding_share": pytest.approx(expected["padding_share"]),
    }
    printed = capsys.readouterr().out
    assert f"rows          {len(layout):,} of 64 tokens" in printed and "algorithms" not in found
    assert found["packing"]["receipt"] == layout_receipt(layout) and layout_receipt(layout) in printed
    (plan,) = found["packing"]["plans"]
    assert plan["fingerprint"] in printed and plan["path"] in printed
    assert Path(plan["path"]).is_file() and Path(plan["path"]).is_relative_to(tmp_path / "cache")


def test_without_an_algorithm_all_are_compared_and_no_plan_is_kept(chats, tmp_path, capsys):
    found = figures([chats, "--sequence-length", LENGTH, "--batch-rows", 2, "--max-segments", 3], tmp_path)
    assert [row["algorithm"] for row in found["algorithms"]] == list(ALGORITHMS)
    printed = capsys.readouterr().out
    for row in found["algorithms"]:
        assert row["algorithm"] in printed and row["rows"] > 0 and row["seconds"] > 0
        bounded = row["algorithm"] not in ("multipack", "concat_then_split")
        assert (row["segments_a_row"]["max"] <= 3) == bounded
    assert "packing" not in found and not (tmp_path / "cache" / "plans").exists()


def test_one_algorithm_and_the_comparison(chats, tmp_path):
    found = figures(
        [chats, "--sequence-length", LENGTH, "--algorithm", "shuffled_best_fit", "--epochs", 2, "--compare"], tmp_path
    )
    assert found["packing"]["epochs"] == 2 and len(found["packing"]["plans"]) == 2
    assert found["packing"]["documents"] == 400
    assert {row.get("epochs") for row in found["algorithms"]} == {1}


def test_an_algorithm_that_leaves_no_row_stays_in_the_table(chats, tmp_path, capsys):
    found = figures([chats, "--sequence-length", LENGTH, "--batch-rows", 1000], tmp_path)
    errors = {row["algorithm"]: row["error"] for row in found["algorithms"] if "error" in row}
    assert list(errors) == ["multipack"] and "multipack leaves no row" in capsys.readouterr().out


def test_a_comparison_in_which_every_algorithm_fails_is_a_failure(chats, capsys):
    assert main(["pack", str(chats), "--sequence-length", str(2**31)]) == 1
    assert capsys.readouterr().out.count("expected less than 2**31") == len(ALGORITHMS)


def test_an_empty_name_of_a_folder_is_a_mistake(chats, capsys):
    words = ["--sequence-length", str(LENGTH), "--algorithm", "multipack", "--materialize", ""]
    assert main(["pack", str(chats), *words]) == 1
    assert "an empty path: give the folder" in capsys.readouterr().err


def test_the_learning_rate_is_printed_for_a_batch(chats, tmp_path, capsys):
    corpus = grain_sft.open_corpus(chats)
    arguments = [chats, "--sequence-length", LENGTH, "--algorithm", "best_fit_decreasing"]
    found = figures(arguments, tmp_path)["learning_rate"]
    assert found == {"supervised_ratio": supervised_ratio(corpus)}
    assert "learning rate" not in capsys.readouterr().out
    batch = ["--batch-tokens", 4096, "--ranks", 8, "--model-type", "Mistral"]
    rate = automatic_learning_rate(corpus, 4096, 8, "mistral")
    assert figures([*arguments, *batch], tmp_path)["learning_rate"]["learning_rate"] == rate
    assert f"learning rate {rate:.4e}, OpenChat's for batches of 32,768 tokens" in capsys.readouterr().out


def test_files_of_tokens_are_packed_by_their_eos(write_tokens, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    paths = [write_tokens(f"{name}.npy", [5, 6, EOS, 7, EOS, 8, 9], "uint16") for name in "ab"]
    words = ["--dtype", "uint16", "--eos-token-id", EOS, "--algorithm", "best_fit_decreasing", "--sequence-length", 5]
    found = figures([*paths, *words, "--source-group-size", 2], tmp_path)
    assert (found["corpus"]["documents"], found["corpus"]["tokens_in_documents"]) == (4, 10)
    assert found["packing"]["rows"] == 2 and "4 tokens are in no document" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "best_fit_decreasing", "--epochs", "2"], "packs every epoch the same"),
        (["--algorithm", "multipack", "--max-segments", "2"], "does not bound documents a row"),
        (["--algorithm", "multipack", "--batch-rows", "9000"], "leaves no row"),
        (["--format", "primer"], "is not of the format primer"),
    ],
)
def test_a_mistake_is_a_sentence(chats, words, message, capsys):
    assert main(["pack", str(chats), "--sequence-length", str(LENGTH), *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[], ["--sequence-length", "0"], ["--sequence-length", "8", "--algorithm", "best"]],
)
def test_wrong_arguments_are_status_2(chats, words):
    with pytest.raises(SystemExit) as exit:
        main(["pack", str(chats), *words])
    assert exit.value.code == 2


def test_olmos_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    folder = write_olmo(tmp_path / "olmo", documents(50))
    words = ["--sequence-length", LENGTH, "--eos-token-id", EOS, "--algorithm", "best_fit_decreasing"]
    found = figures([folder, *words], tmp_path)
    assert found["corpus"]["documents"] == found["packing"]["documents"] == 50
