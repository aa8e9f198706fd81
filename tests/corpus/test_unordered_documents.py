"""Corpora whose episodes.idx lists documents in any order, some of them empty or overlapping, are read correctly."""

import dataclasses
import json

import numpy as np
import pytest
from sft_files import EOS, documents, error_of, write_episodes, write_olmo

from grain_sft import PackedLayout, WindowLayout, open_corpus
from grain_sft.corpus import Corpus
from grain_sft.layout import OlmoVslLayout, numbers_in
from grain_sft.storage import describe


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    """A corpus of 41 documents in two shards. The last document of each shard is empty.

    The source of document n is record n + 1 of input 0.
    """
    folder, random = write_episodes(tmp_path / "corpus", documents(39, 4), shards=2), np.random.default_rng(1)
    for path in folder.rglob("episodes.idx"):
        pairs = np.fromfile(path, "<u8").reshape(-1, 2)
        np.concatenate([random.permutation(pairs), [(7, 0)]]).astype("<u8").tofile(path)
    np.stack([np.zeros(41), np.arange(1, 42)], axis=1).astype("<i8").tofile(tmp_path / "sources.bin")
    return dataclasses.replace(open_corpus(folder), sources_file=describe(str(tmp_path / "sources.bin")))


def test_chunks_lie_within_their_documents(corpus):
    layout = OlmoVslLayout(corpus, 16, min_sequence_length=2)
    pieces, first = layout.pieces(np.arange(len(layout))), np.array([0, corpus.shards[0].num_tokens])
    start, length = (column[pieces.document] for column in layout.documents)
    chunk_start = first[pieces.shard] + pieces.start - start
    assert (chunk_start >= 0).all() and (chunk_start + pieces.length <= length).all()


def test_windows_find_every_row_that_has_a_token_of_a_document(corpus):
    layout, (starts, lengths) = WindowLayout(corpus, 8), corpus.documents
    spans = [span for row in range(len(layout)) for span in layout.spans(row)]
    begins = np.array([corpus.shard_borders[span.shard] + span.start for span in spans])
    assert len(spans) == len(layout)
    for numbers in (*np.arange(len(starts))[:, None], np.array([5, 3, 17, 3])):
        has_token = [(begins < starts[n] + lengths[n]) & (starts[n] < begins + 8) & (lengths[n] > 0) for n in numbers]
        assert layout.rows_of_documents(numbers).tolist() == np.flatnonzero(np.any(has_token, axis=0)).tolist()


def test_documents_found_by_eos_have_the_sources_of_the_indexed_documents(corpus):
    layout = PackedLayout(corpus, 64, boundaries="eos")
    for number, (_, record) in enumerate(layout.sources.tolist()):
        assert layout.documents.start[number] == corpus.documents.start[record - 1]
        assert numbers_in(layout, np.array([record - 1])).tolist() == [number]
    assert len(layout.sources) == 39 and numbers_in(layout, np.array([40])).tolist() == []


def test_overlapping_documents_are_reported_as_an_overlap(tmp_path, run_command):
    folder = write_episodes(tmp_path / "corpus", documents(9, 4), shards=1)
    [path] = folder.rglob("episodes.idx")
    path.write_bytes(2 * path.read_bytes())
    tokens = open_corpus(folder).num_tokens
    printed = run_command("pack", folder, "--sequence-length", "64", "--algorithm", "best_fit_decreasing").out
    assert f"documents overlap by {tokens:,} tokens or more" in printed


def test_metadata_decide_which_parts_of_a_list_continue(tmp_path):
    """Each folder has one document in two parts. Part 0 of `a` ends with an EOS, but the metadata state that it continues."""
    texts = {"a": [5, EOS, 6, EOS], "b": [5, 6, 7, EOS]}
    docs = {name: [(np.array(text, np.uint32), np.ones(4, bool))] for name, text in texts.items()}
    folders = [write_olmo(tmp_path / name, each, part_tokens=2) for name, each in docs.items()]
    (folders[0] / "dataset_statistics.json").write_text(json.dumps({"continued_parts": [1]}))
    assert open_corpus(folders, eos_token_id=EOS).documents.length.tolist() == [4, 4]
    assert f"{folders[1]}/token_ids_part_0001.npy: can't tell whether" in error_of(folders)
