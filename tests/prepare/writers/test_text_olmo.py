"""OLMo-core reads the right instances from the files that `prepare` writes for plain documents."""

import csv
import gzip
import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from batches import golden_values
from documents import request_of, save_golden_tokenizer, texts_of, write

from grain_sft import NpyDataSource, WindowLayout, open_corpus
from grain_sft.prepare import load_tokenizer, prepare


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
