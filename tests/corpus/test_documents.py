"""Documents end at each EOS token, or only at an EOS before a BOS, or are listed in any order, some empty or overlapping.

The finder of documents reads the tokens in blocks and caches the documents. The size of a block does not change them.
"""

import dataclasses
import json

import numpy as np
import pytest
from batches import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sft_files import EOS, documents, error_of, write_episodes, write_olmo

from grain_sft import PackedLayout, WindowLayout, open_corpus
from grain_sft.corpus import Corpus, content, document_finder
from grain_sft.errors import CorpusError
from grain_sft.layout import OlmoVslLayout, numbers_in
from grain_sft.storage import describe

BOS = 1


def documents_by_a_loop(files: list[list[int]], bos: int | None) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of each document, found by a plain loop over the tokens.

    If `bos` is None, every EOS ends a document. Else an EOS ends one only before `bos` or at the end of a file.
    """
    found, before = [], 0
    for tokens in files:
        start = 0
        for stop, token in enumerate(tokens, 1):
            if token == EOS and (bos is None or stop == len(tokens) or tokens[stop] == bos):
                found.append((before + start, stop - start))
                start = stop
        before += len(tokens)
    return found


@settings(max_examples=examples(150))
@given(
    files=st.lists(st.lists(st.sampled_from([EOS, EOS, BOS, BOS, 3, 4]), max_size=25), min_size=1, max_size=4),
    bos=st.sampled_from([None, BOS, EOS]),
    block=st.integers(1, 9),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "uint64"]),
)
def test_documents_do_not_depend_on_the_size_of_blocks(tmp_path_factory, files, bos, block, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_finder, "_CHUNK_BYTES", np.dtype(dtype).itemsize * block)
        paths = [tmp_path_factory.getbasetemp() / f"blocks-{number}.npy" for number in range(len(files))]
        for path, tokens in zip(paths, files, strict=True):
            np.array(tokens, dtype).tofile(path)
        corpus = open_corpus(paths, dtype=dtype, eos_token_id=EOS)
        start, length = corpus.find_documents(bos_token_id=bos).documents
        assert list(zip(start.tolist(), length.tolist(), strict=True)) == documents_by_a_loop(files, bos)
        assert corpus.num_documents == sum(tokens.count(EOS) for tokens in files)
        with pytest.raises(CorpusError, match="boundaries='bos': expected one of auto, eos"):
            corpus.find_documents("bos")


def test_a_scan_is_cached_until_the_tokens_or_the_ids_change(tmp_path, write_tokens, monkeypatch, calls_of, own_cache):
    """The three patches also cache small files and files that were just written."""
    monkeypatch.setattr(document_finder, "_CACHED_FROM", 0)
    monkeypatch.setattr(content, "_CACHED_FROM", 0)
    monkeypatch.setattr(content, "_SETTLED", -1)
    scans = calls_of(document_finder, "_scan")
    tokens = np.random.default_rng(0).integers(0, 5, 10_000)
    path = write_tokens("0.npy", tokens, "uint16")

    def found(eos=EOS, bos=None):
        finder = open_corpus(path, dtype="uint16", eos_token_id=eos).find_documents(bos_token_id=bos)
        return list(zip(*(each.tolist() for each in finder.documents), strict=True))

    first = found()
    assert found() == first == documents_by_a_loop([tokens.tolist()], None) and len(scans) == 1
    assert found(bos=BOS) != first and found(eos=3) != first and len(scans) == 3
    tokens[0] = EOS if tokens[0] != EOS else 4
    write_tokens("0.npy", tokens, "uint16")
    assert found() != first and len(scans) == 4
    for cached in (tmp_path / "cache" / "documents").glob("*.arrays"):
        cached.write_bytes(cached.read_bytes()[:-100])  # the next scan replaces the damaged file
    assert found() == found() == documents_by_a_loop([tokens.tolist()], None) and len(scans) == 5


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
