"""Many small files: they are rendered together, and each record keeps its file and line."""

import json
from pathlib import Path

import numpy as np
from tokenizer_makers import save_sentencepiece

from grain_sft.corpus import open_corpus
from grain_sft.prepare import Dataset, Request, load_tokenizer, prepare
from grain_sft.prepare.chunks import Chunks, Contents
from grain_sft.prepare.records import inputs


def test_many_small_texts_are_rendered_together_and_keep_their_sources(tmp_path: Path) -> None:
    """Also between larger files, in two datasets, and where some are bad."""
    for name, count in ("a", 300), ("b", 40):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number:03d}.txt").write_text("" if number == 7 else f"the answer {number}\n")
    (tmp_path / "a/100.txt").write_text("the question " * 100_000)
    (tmp_path / "a/200.txt").write_bytes(b"\xff")
    model = save_sentencepiece(tmp_path)
    datasets = tuple(Dataset((str(tmp_path / name),)) for name in "ab")
    request = Request(datasets, "text", str(model), "olmo", on_error="skip", shuffle=False)
    entries = inputs.list_inputs([dataset.paths for dataset in datasets])
    groups = inputs.grouped(entries, inputs.plan_units(entries))
    assert [len(group) for group in groups] == [100, 1, 199, 40]
    manifest = prepare(request, tmp_path / "out", workers=2)
    assert manifest["dropped"] == {"no text": 2} and manifest["rejected"] == 1
    names = [entry["path"] for entry in manifest["inputs"]]
    corpus = open_corpus(tmp_path / "out")
    kept = [number for number in range(340) if number not in (7, 200, 307)]
    assert corpus.sources is not None and corpus.sources.tolist() == [[number, 1] for number in kept]
    tokenizer = load_tokenizer(model)
    for document, (source, _) in zip(corpus.iter_documents(), corpus.sources, strict=True):
        assert tokenizer.decode(document.tokens[:-1].tolist()) == Path(names[source]).read_text()
    [bad] = (tmp_path / "out.rejected.jsonl").read_text().splitlines()
    assert json.loads(bad)["file"] == names[200] and json.loads(bad)["line"] == 1


def test_lines_above_the_range_of_uint32_keep_their_numbers(tmp_path: Path) -> None:
    chunks, lines = Chunks(str(tmp_path), "key"), [3, 2**32 + 5]
    for number, line in enumerate(lines):
        made = Contents([(line, 0, 1, 1, 0, 0)], [np.array([7], np.uint32)], [np.ones(1, np.bool_)])
        chunks.write(number, made.encode("key", np.dtype(np.uint16), np.dtype(np.bool_), None))
    assert chunks.column(chunks.headers(2), "line").tolist() == lines
