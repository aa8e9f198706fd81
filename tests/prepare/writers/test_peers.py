"""Corpora in format megatron are byte for byte what megatron-core writes, and OLMo-core reads the right rows of plain texts."""

import csv
import gzip
import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from batches import golden_values
from megatron_corpora import GOLDEN, write_megatron
from prepared import request_of, save_golden_tokenizer, save_trained, texts_of, write
from sft_files import documents, write_olmo

from grain_sft import NpyDataSource, WindowLayout, open_corpus
from grain_sft.errors import CorpusError, CorpusFileError, PrepareError
from grain_sft.prepare import convert, load_tokenizer, prepare

DOCS = [[[5, 6, 7, 1]], [[9, 1]], [[]], [[4, 4], [4, 4, 1]]]  # each document is a list of sequences


def tokens_of(corpus) -> list[list[int]]:
    return [document.tokens.tolist() for document in corpus.iter_documents()]


def prefix(output: Path, split: str = "train") -> Path:
    return output / split / "text_document"


@pytest.mark.parametrize("name", ["plain_uint16", "plain_int32"])
def test_files_are_those_that_megatron_core_writes(tmp_path: Path, name: str) -> None:
    convert(GOLDEN / name, tmp_path / "out", "megatron")
    for suffix in (".bin", ".idx"):
        assert Path(f"{prefix(tmp_path / 'out')}{suffix}").read_bytes() == (GOLDEN / f"{name}{suffix}").read_bytes()


@pytest.mark.parametrize("format", ["olmo", "episodes", "primer", "openchat", "megatron"])
def test_documents_stay_the_same_in_every_format_and_back(tmp_path: Path, format: str) -> None:
    manifest = convert(write_megatron(tmp_path / "data" / "a", DOCS), tmp_path / format, format)
    expected = [[5, 6, 7, 1], [9, 1], [], [4, 4, 4, 4, 1]]
    if format in ("olmo", "primer"):
        expected.remove([])
        assert manifest["dropped"] == {"no token, which this format can't hold": 1}
    corpus = open_corpus(tmp_path / format, eos_token_id=1)
    assert tokens_of(corpus) == expected and corpus.sources is not None
    convert(tmp_path / format, tmp_path / "back", "megatron")
    assert tokens_of(open_corpus(prefix(tmp_path / "back"))) == expected
    assert all(document.loss.all() for document in corpus.iter_documents())


def test_splits_of_different_dtypes_keep_their_tokens(tmp_path: Path) -> None:
    write_megatron(prefix(tmp_path / "in"), [[[5, 6]]], dtype="uint16")
    write_megatron(prefix(tmp_path / "in", "val"), [[[5, 70_006]]], dtype="int32")
    convert(tmp_path / "in", tmp_path / "out", "megatron")
    assert tokens_of(open_corpus(prefix(tmp_path / "out", "val"))) == [[5, 70_006]]
    for format in ("olmo", "primer", "megatron"):  # the refused calls leave no unfinished work
        with pytest.raises(PrepareError, match=f"format {format}: token id 70006 does not fit .* uint16"):
            convert(tmp_path / "in", tmp_path / "small", format, tokenizer=str(save_trained(tmp_path)))
    write_megatron(tmp_path / "padded/a", [[[5]]], dtype="int32")
    (tmp_path / "padded/corpus.json").write_text('{"format": "grain_sft corpus", "version": 1, "pad_token_id": 70006}')
    convert(tmp_path / "padded", tmp_path / "out2", "megatron")
    assert open_corpus(tmp_path / "out2").pad_token_id == 70_006


def test_masks_blends_and_unknown_ends_of_documents_are_not_converted(tmp_path: Path) -> None:
    masked = write_olmo(tmp_path / "sft", documents(20))
    with pytest.raises(PrepareError, match=r"has no masks, but .* of .* tokens of train take no loss"):
        convert(masked, tmp_path / "sft_out", "megatron", eos_token_id=2)
    convert(masked, tmp_path / "sft_out", "episodes", eos_token_id=2)  # the refused call left no unfinished work
    one = write_megatron(tmp_path / "a", DOCS)
    with pytest.raises(CorpusError, match="weights of a blend are not converted"):
        convert(f"1 {one} 2 {one}", tmp_path / "out", "olmo")
    np.arange(9, dtype=np.uint32).tofile(tmp_path / "x.npy")
    with pytest.raises(CorpusError, match=r"x\.npy: no file states where documents end\. Give eos_token_id"):
        convert(tmp_path / "x.npy", tmp_path / "out", "megatron")
    with pytest.raises(CorpusFileError, match="missing: no such file"):  # before the search for the ends of documents
        convert(tmp_path / "x.npy", tmp_path / "out", "megatron", tokenizer="missing")
    assert not (tmp_path / "out").exists()
    dropped = convert(tmp_path / "x.npy", tmp_path / "out", "megatron", eos_token_id=5)["dropped"]
    assert dropped == {"tokens outside of documents": 3}


def test_prepare_writes_texts_as_a_megatron_corpus(tmp_path: Path) -> None:
    texts = [f"the answer number {number} " * (1 + number % 7) for number in range(200)]
    model, path = save_trained(tmp_path, ()), write(tmp_path / "a.jsonl", texts)
    tokenizer = load_tokenizer(model)
    ids = [[*tokenizer.encode([text])[0], tokenizer.eos_token_id] for text in texts]

    request = request_of(model, path, format="megatron", val_frac=0.1)
    assert prepare(request, tmp_path / "out", workers=1)["splits"]["val"]["documents"] == 20
    train, held_out = (tokens_of(open_corpus(prefix(tmp_path / "out", split))) for split in ("train", "val"))
    assert sorted(train + held_out) == sorted(ids)
    opened = open_corpus(tmp_path / "out")
    assert tokens_of(opened) == train and (opened.eos_token_id, opened.dtype) == (tokenizer.eos_token_id, np.uint16)
    assert opened.source_names == (str(tmp_path / "a.jsonl"),)
    assert train == [ids[line - 1] for line in opened.sources[:, 1]] and (np.diff(opened.sources[:, 1]) > 0).all()


@pytest.mark.parity
def test_maxtext_reads_the_documents_that_were_written(tmp_path: Path) -> None:
    reader = pytest.importorskip("maxtext.input_pipeline._mmap_datasource")
    convert(GOLDEN / "web_uint16", tmp_path / "out", "megatron")
    dataset = reader.MMapIndexedDataset(str(prefix(tmp_path / "out")))
    assert [tokens.tolist() for tokens in dataset[:]] == tokens_of(open_corpus(GOLDEN / "web_uint16"))


def prepared(folder: Path, texts: list[str], **options) -> Path:
    """Prepare texts and return the folder of split train."""
    path = write(folder / "texts.jsonl", texts)
    request = request_of(save_golden_tokenizer(folder), path, empty="keep", shuffle=False, **options)
    prepare(request, folder / "out", workers=1)
    return folder / "out/train"


def test_rows_and_boundaries_are_those_that_olmo_core_reads(tmp_path: Path) -> None:
    """`text_olmo.json` has the rows that OLMo-core reads if SentencePiece itself encodes the texts."""
    golden = golden_values("text_olmo.json")
    folder, length = prepared(tmp_path, golden["texts"]), golden["length"]
    windows = NpyDataSource(WindowLayout(open_corpus(folder), length))
    rows = (np.asarray(windows[row]["tokens"], "<i8") for row in range(len(windows)))
    assert [hashlib.sha256(row.tobytes()).hexdigest() for row in rows] == golden["windows"]
    with gzip.open(folder / "token_ids_part_0000.csv.gz", "rt") as file:
        ends = [int(stop) for _, stop, *_ in csv.reader(file)]
    borders = np.union1d(ends, np.arange(0, (len(windows) + 1) * length, length))
    lengths = np.diff(borders[borders <= len(windows) * length]).tolist()
    assert lengths == list(itertools.chain.from_iterable(golden["document_lengths"]))


@pytest.mark.parity
def test_olmo_core_reads_the_same_rows_from_the_files(tmp_path: Path) -> None:
    data = pytest.importorskip("olmo_core.data")
    folder = prepared(tmp_path, ["", *texts_of(600)], part_bytes=20_000)
    paths, eos = sorted(map(str, folder.glob("*.npy"))), load_tokenizer(tmp_path / "fim.model").eos_token_id
    options = {"pad_token_id": 0, "eos_token_id": eos, "vocab_size": 500, "dtype": np.uint16}
    theirs = data.NumpyFSLDataset(*paths, sequence_length=128, **options)
    ours = NpyDataSource(WindowLayout(open_corpus(folder), 128))
    assert len(theirs) == len(ours) > 100 and len(paths) > 3
    for row in range(len(ours)):
        np.testing.assert_array_equal(theirs[row]["input_ids"].numpy(), ours[row]["tokens"])
