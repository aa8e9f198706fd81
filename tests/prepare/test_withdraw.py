"""`grain-sft withdraw` rewrites a corpus without some of its documents."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from prepared import CHAT_FORMATS, digests, make_each_format

import grain_sft
from grain_sft.errors import RowIndexError
from grain_sft.layout import corpus_documents_named, documents_named_in, traits

INPUTS = {"a/chats.jsonl": 24, "b/chats.jsonl": 12, "b/more.jsonl": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three input files, in each format. Two of the input files have the same name."""
    return make_each_format(tmp_path_factory.mktemp("withdraw"), INPUTS)


def records_of(corpus: grain_sft.Corpus) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """Return tokens and loss of each document, by the (input, line) that it was made of."""
    found = {each.source: (each.tokens.tolist(), each.loss.tolist()) for each in corpus.iter_documents()}
    assert len(found) == corpus.num_documents
    return found


@pytest.mark.parametrize("form", CHAT_FORMATS)
def test_a_corpus_is_written_without_the_named_documents(folder, tmp_path, form, run_command):
    files = {"openchat": "openchat.eval.parquet", "primer": "val_input_ids.bin"}
    splits = {"train": folder / form, "val": folder / form / files.get(form, "val")}
    before = {name: records_of(grain_sft.open_corpus(path)) for name, path in splits.items()}
    numbers = [3, 5, len(before["train"]) + 1]  # split val continues the numbers, so this is its second document
    (tmp_path / "list.txt").write_text("a/chats.jsonl:7\nb/chats.jsonl:2\n")
    gone = {[*before["train"], *before["val"]][number] for number in numbers}
    gone |= {(0, 7), (1, 2)} | {(2, line) for line in range(1, INPUTS["b/more.jsonl"] + 1)}
    named = [*numbers, tmp_path / "list.txt", "more.jsonl"]
    printed = run_command("withdraw", folder / form, *named, "--output", tmp_path / "out").out
    assert f"dropped  {len(gone)}: withdrawn" in printed and "Begin a run on it at step 0" in printed
    for name, path in splits.items():
        after = records_of(grain_sft.open_corpus(tmp_path / "out" / path.relative_to(folder / form)))
        assert list(after.items()) == [item for item in before[name].items() if item[0] not in gone]
    assert digests(tmp_path / "out").keys() == digests(folder / form).keys()


def test_a_second_call_with_the_same_documents_does_nothing_and_one_with_others_is_refused(folder, tmp_path, run_command):
    command = ["withdraw", folder / "olmo", "--output", tmp_path / "out"]
    run_command(*command, "4", "2")
    assert "is complete: nothing to do" in run_command(*command, "2", "4").out
    assert "request.without" in run_command(*command, "2", "5", status=1).err


WRONG_NAMES = [
    (["1000"], "document 1000: expected 0 to 44, the corpus's documents"),
    (["chats.jsonl:3"], "'chats.jsonl': several inputs fit"),
    (["b/more.jsonl:80"], "b/more.jsonl:80: no document was made of this record"),
    (["nobody"], "'nobody' is not a document number"),
    ([""], "'' is not a document number"),
    (["a/chats.jsonl", "b/chats.jsonl", "more.jsonl"], "no document of split train is left"),
]


@pytest.mark.parametrize(("named", "message"), WRONG_NAMES)
def test_names_that_are_wrong_or_leave_no_document_are_refused(folder, tmp_path, named, message, run_command):
    assert message in run_command("withdraw", folder / "episodes", *named, "--output", tmp_path / "out", status=1).err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("corpus", "output"), [("out", "out"), ("out/train", "out"), ("link", "out"), ("out", "link")])
def test_an_output_that_would_replace_the_corpus_is_refused(folder, tmp_path, corpus, output, run_command):
    shutil.copytree(folder / "olmo", tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    files = digests(tmp_path / "out")
    command = ["withdraw", tmp_path / corpus, "4", "--format", "olmo", "--output", tmp_path / output, "--overwrite"]
    expected = f"is an input, which the output {tmp_path}/out would replace. Give another output"
    assert expected in run_command(*command, status=1).err
    assert digests(tmp_path / "out") == files


def test_a_corpus_without_a_manifest_needs_the_format_of_the_output(tmp_path, run_command):
    np.array([5, 2, 6, 7, 2], np.uint16).tofile(tmp_path / "x.npy")
    command = ["withdraw", tmp_path / "x.npy", "0", "--output", tmp_path / "out"]
    expected = "states no format. Check the path of the corpus, or give the format of the output"
    assert expected in run_command(*command, status=1).err
    run_command(*command, "--format", "megatron", "--dtype", "uint16", "--eos-token-id", "2")
    assert [each.tokens.tolist() for each in grain_sft.open_corpus(tmp_path / "out").iter_documents()] == [[6, 7, 2]]


def test_amendments_name_records_as_the_command_does(folder):
    layout = grain_sft.PaddedLayout(grain_sft.open_corpus(folder / "olmo"), 64)
    sources = layout.corpus.sources[:, 0]
    first = int(np.argmin(sources))
    line = layout.corpus.sources[first, 1]
    for name in (f"a/chats.jsonl:{line}", f"{folder}/a/chats.jsonl:{line}"):
        found = documents_named_in([layout], ["more.jsonl", name])[0]
        assert found.tolist() == sorted([first, *np.flatnonzero(sources == 2)])


def test_documents_are_named_by_numbers_and_by_a_file_of_names_that_is_read_once(folder, tmp_path, calls_of):
    corpus, reads = grain_sft.open_corpus(folder / "olmo"), calls_of(traits, "read_sources")
    (tmp_path / "names").write_text("a/chats.jsonl\nb/more.jsonl:1\nb/more.jsonl:2\n")
    numbers = corpus_documents_named([corpus], [str(tmp_path / "names"), *np.arange(2)]).tolist()
    assert corpus_documents_named([corpus], "12").tolist() == [12]  # the text "12" is one name, not the names 1 and 2
    assert len(reads) == 1 and numbers[:2] == [0, 1] and len(numbers) > 20
    (tmp_path / "names").write_text(str(tmp_path / "names"))
    padded = grain_sft.PaddedLayout(corpus, 64)
    documents_named_in([padded, grain_sft.PaddedLayout(corpus, 32)], "more.jsonl")
    assert len(reads) <= 2  # two layouts share one read
    names = {str(tmp_path / "names"): "is not a document number", -1: "document=-1: expected an integer, 0 or more"}
    for name, message in (names | {1.5: "document=1.5: expected", str(1 << 63): "expected at most"}).items():
        with pytest.raises(RowIndexError, match=message):
            corpus_documents_named([corpus], [name])
        with pytest.raises(RowIndexError, match=message):
            documents_named_in([padded], [name])
