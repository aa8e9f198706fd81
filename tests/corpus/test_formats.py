"""Corpora in the formats olmo and episodes are recognised and read whole. Files that don't fit together are errors.

A corpus in format olmo is numbered parts, each with its tokens, its label mask and its document boundaries. The end of a part
may cut a document. A corpus in format episodes is a tokens.bin, a mask.bin and an episodes.idx, or shards of these files.
"""

import gzip
import json
import os

import numpy as np
import pytest
from sft_files import EOS, assert_documents, documents, error_of, joined, write_episodes, write_olmo, write_sources

from grain_sft import GrainSftError, NpyDataSource, PackedLayout, PaddedLayout, WindowLayout, open_corpus
from grain_sft.layout import MaterializedLayout
from grain_sft.prepare.materialize import materialize


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("part_tokens", [3, 100, 10_000])
def test_documents_that_are_cut_by_the_ends_of_olmo_parts_are_read_whole(tmp_path, dtype, part_tokens):
    docs = documents(high=200)
    corpus = open_corpus(write_olmo(tmp_path, docs, dtype=dtype, part_tokens=part_tokens), eos_token_id=EOS)
    assert corpus.dtype == dtype and corpus.has_loss and not corpus.has_weights
    assert_documents(corpus, docs)
    if part_tokens == 10_000:  # a single part
        (tmp_path / "token_ids_part_0000.csv.gz").unlink()  # without boundaries, documents end at their EOS
        assert_documents(open_corpus(tmp_path, eos_token_id=EOS), docs)


def test_an_olmo_folder_opens_as_its_train_split_and_each_split_opens_alone(tmp_path):
    train, val = documents(), documents(5, 1)
    write_olmo(tmp_path / "train", train, sources=True)
    write_olmo(tmp_path / "val", val)
    tokenizer = {"eos_token_id": EOS, "pad_token_id": 1, "sha256": "x"}
    (tmp_path / "prepare.json").write_text(json.dumps({"tokenizer": tokenizer, "inputs": [{"path": "a"}]}))
    corpus = open_corpus(tmp_path)
    assert_documents(corpus, train, sources=True)
    assert (corpus.eos_token_id, corpus.pad_token_id, corpus.tokenizer_sha256) == (EOS, 1, "x")
    assert corpus.source_names == ("a",)
    assert corpus == open_corpus(tmp_path / "train", format="olmo")
    assert_documents(open_corpus(tmp_path / "val"), val)
    assert open_corpus(tmp_path, eos_token_id=3).eos_token_id == 3
    for name in ("eos_token_id", "pad_token_id"):
        (tmp_path / "prepare.json").write_text(json.dumps({"tokenizer": {name: 1 << 16}}))
        assert f"prepare.json: {name}=65536: expected an id that uint16 holds, 0 to 65535" in error_of(tmp_path)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("metadata", [True, False])
def test_episodes_are_read_flat_or_sharded_with_masks_or_weights(tmp_path, flat, dtype, weights, metadata):
    docs, val = documents(weights=weights), documents(3, 1, weights=weights)
    write_episodes(tmp_path, docs, dtype=dtype, flat=flat, shards=1 if flat else 3, metadata=metadata, gap=2)
    write_episodes(tmp_path, val, split="val", dtype=dtype, metadata=metadata)
    corpus = open_corpus(tmp_path)
    assert (corpus.dtype, corpus.has_weights, corpus.has_loss) == (dtype, weights, True)
    assert corpus.eos_token_id == (EOS if metadata else None)
    assert_documents(corpus, docs)
    assert_documents(open_corpus(tmp_path / "val"), val)
    assert corpus == open_corpus(tmp_path / "train") == open_corpus(tmp_path, format="episodes")


def test_a_range_of_tokens_may_cross_parts(tmp_path):
    docs = documents()
    corpus = open_corpus(write_olmo(tmp_path, docs, part_tokens=50), eos_token_id=EOS)
    tokens, loss = joined(docs)
    for start, stop in ((0, 0), (0, len(tokens)), (49, 51), (10, 333), (100, 100), (50, 100), (len(tokens),) * 2):
        found = corpus.read(start, stop)
        np.testing.assert_array_equal(found[0], tokens[start:stop])
        np.testing.assert_array_equal(found[1], loss[start:stop])
        assert found[0].dtype == np.uint16 and found[1].dtype == np.bool_
    for start, stop in ((-1, 2), (3, 2), (0, len(tokens) + 1)):
        with pytest.raises(GrainSftError, match="expected a range within 0 to"):
            corpus.read(start, stop)
    for number in (-1, 40):
        with pytest.raises(IndexError, match=f"document {number} of .*: expected 0 to 39"):
            corpus.document(number)


def test_the_documents_of_a_plain_corpus_end_at_its_eos_tokens(tmp_path, write_tokens):
    write_tokens("a.npy", [1, 5, EOS, EOS, 7])
    write_tokens("b.npy", [3, EOS])
    corpus = open_corpus(tmp_path, eos_token_id=EOS)
    start, length = corpus.documents
    assert (start.tolist(), length.tolist()) == ([0, 3, 5], [3, 1, 2])
    assert [document.tokens.tolist() for document in corpus.iter_documents()] == [[1, 5, EOS], [EOS], [3, EOS]]
    assert corpus.document(2).loss.tolist() == [True, True] and corpus.read(0, 2)[1] is None
    assert (corpus.has_loss, corpus.has_weights, corpus.sources, corpus.num_documents) == (False, False, None, 3)
    assert open_corpus(tmp_path).num_documents is None
    assert "no file states where documents end. Give eos_token_id" in error_of(tmp_path)


def test_a_loss_file_that_changes_after_opening_is_noticed(tmp_path):
    write_episodes(tmp_path, documents(), flat=True)
    path = tmp_path / "train" / "mask.bin"
    data = path.read_bytes()
    for read_before, change, expected in (
        ([], lambda: path.write_bytes(data[:-1]), "shrank since it was indexed"),
        ([], lambda: path.write_bytes(bytes(1 - byte for byte in data)), "other content: it was replaced"),
        ([], path.unlink, "can't be opened"),
        ([0], lambda: os.truncate(path, 8), "shrank since it was indexed"),
    ):
        path.write_bytes(data)
        source = NpyDataSource(WindowLayout(open_corpus(tmp_path), 8))
        source.read(read_before)
        change()
        with pytest.raises(GrainSftError, match=rf"{path}.*{expected}"):
            source.read([5])


NOT_PAIRS = ("5", "5,x", "5,6,7", "", "-5,6", "5,99999999999999999999", ",6", "5,")
OUT_OF_ORDER = "is empty, overlaps the document before, or leaves the shard; expected 5 <= start < end <= 100"
WRONG_BOUNDARIES = [
    *((f"0,5\n{line}\n", f":2: expected 'start,end' in digits, found '{line}'") for line in NOT_PAIRS),
    *((f"0,5\n{wrong}\n", f":2: {wrong} {OUT_OF_ORDER}") for wrong in ("4,6", "5,5", "5,101")),
    ("", "lists no document, but the shard has 100 tokens"),
    ("1" * 1000, ":1: expected 'start,end' in digits, found"),
    ("1" * 400_000, ":1: expected 'start,end', found"),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_BOUNDARIES)
def test_a_wrong_line_of_boundaries_is_named(tmp_path, text, expected):
    write_olmo(tmp_path, documents(10))
    path = tmp_path / "token_ids_part_0000.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    message = error_of(tmp_path, eos_token_id=EOS)
    assert str(path) in message and expected in message


def test_boundaries_that_are_cut_short_are_an_error(tmp_path):
    write_olmo(tmp_path, documents(10))
    path = tmp_path / "token_ids_part_0000.csv.gz"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        message = error_of(tmp_path, eos_token_id=EOS)
        assert str(path) in message and ("cut short" in message or "Copy the file again" in message), size


def test_boundaries_are_read_in_blocks_with_carriage_returns_gaps_and_no_last_newline(tmp_path, monkeypatch):
    docs = documents(400)
    monkeypatch.setattr("grain_sft.corpus.boundaries._BLOCK", 17)
    assert_documents(open_corpus(write_olmo(tmp_path, docs, part_tokens=100_000)), docs)
    (tmp_path / "token_ids_part_0000.csv.gz").write_bytes(gzip.compress(b"0,5\r\n7,8\r\n8,10"))
    start, length = open_corpus(tmp_path).documents
    assert (start.tolist(), length.tolist()) == ([0, 7, 8], [5, 1, 2])


def test_the_eos_or_the_number_of_sources_shows_whether_a_document_continues_in_the_next_part(tmp_path):
    """Each case has the documents 5 6 7 EOS and 8 9, in parts of `size` tokens.

    "cut" has the parts 5 6 7 | EOS 8 9, and "whole" has 5 6 7 EOS | 8 9. "truncated" has 8 9 | 5 6 | 7 EOS: neither of the
    first two parts ends with an EOS, but only the second cuts a document.
    """
    docs = [(np.array([5, 6, 7, EOS], np.uint32), np.ones(4, bool)), (np.array([8, 9], np.uint32), np.ones(2, bool))]
    for name, listed, size in (("cut", docs, 3), ("whole", docs, 4), ("truncated", docs[::-1], 2)):
        folder = write_olmo(tmp_path / name, listed, part_tokens=size)
        assert "Give eos_token_id" in error_of(folder)
        if name != "truncated":
            assert_documents(open_corpus(folder, eos_token_id=EOS), listed)
        write_sources(folder / "sources.bin", listed)
        for eos in (None, EOS, 77):
            if name == "truncated":  # 2 documents in 3 entries: nothing states which two belong together
                assert "lists 2 documents" in error_of(folder, eos_token_id=eos)
            else:
                assert_documents(open_corpus(folder, eos_token_id=eos), listed, sources=True)
        write_sources(folder / "sources.bin", listed * 3)
        assert "lists 6 documents" in error_of(folder, eos_token_id=EOS)


def test_the_statistics_state_which_parts_begin_within_a_document(tmp_path):
    """The documents have 4, 2, 4 and 2 tokens, and a part has 2. So parts 1 and 4 begin within a document."""
    docs = [(np.array([5, 6, 7, 8], np.uint32), np.ones(4, bool)), (np.array([9, 9], np.uint32), np.ones(2, bool))] * 2
    folder = write_olmo(tmp_path, docs, part_tokens=2, sources=True)
    assert "lists 4 documents, but boundary files hold 6 entries" in error_of(folder)
    path = folder / "dataset_statistics.json"
    path.write_text(json.dumps({"continued_parts": [1, 4]}))
    assert_documents(open_corpus(folder), docs, sources=True)
    path.write_text(json.dumps({"continued_parts": [1, "4"]}))
    assert "continued_parts[1] is '4'; expected an integer" in error_of(folder)
    path.write_text(json.dumps({"continued_parts": [1, 3, 4]}))
    assert "6 entries, and 3 of them may continue a document. Copy the files again." in error_of(folder)


def test_parts_that_lack_a_file_or_have_one_twice_are_named(tmp_path):
    for name, expected in (("token_ids_part_0001.npy", "but part"), ("token_ids_part_0001.csv.gz", "but other parts")):
        folder = write_olmo(tmp_path / f"without {name.replace('.', ' ')}", documents())
        (folder / name).unlink()
        assert f"lacks {name}, {expected}" in error_of(folder) == error_of([folder])  # also, both messages are equal
    folder = write_olmo(tmp_path / "twice", documents())
    (folder / "labels_mask_part_00.npy").write_bytes(b"")
    assert "are both part 0" in error_of(folder)
    assert "is not of the format olmo; expected a directory with" in error_of(tmp_path, format="olmo")
    assert "is not of the format episodes; expected" in error_of(tmp_path / "twice", format="episodes")


TOTAL = len(joined(documents(10))[0])
PAST_THE_END, FAR_PAST_IT = (np.array(pairs, "<u8").tobytes() for pairs in ([[0, 5], [3, TOTAL]], [[2**64 - 1, 2]]))
# Name of a file, its content (None: the file is missing), whether the corpus has metadata, and the message.
WRONG_EPISODES = [
    ("train/episodes.idx", b"\0" * 24, True, "is not a multiple of 16"),
    ("train/episodes.idx", PAST_THE_END, True, f"document 1 begins at token 3 and has {TOTAL} tokens, but"),
    ("train/episodes.idx", FAR_PAST_IT, True, "document 0 begins at token 18446744073709551615 and has 2 tokens"),
    ("train/mask.bin", b"\1" * (TOTAL - 1), True, "values for"),
    ("train/tokens.bin", b"\1" * TOTAL, False, "one value for each token of dtype uint16 or uint32"),
    ("dataset_metadata.json", b'{"token_dtype": 5}', True, "token_dtype is 5; expected text"),
    ("dataset_metadata.json", b'{"token_dtype": "uint64"}', True, "uint16 or uint32"),
    ("dataset_metadata.json", b"[", True, "dataset_metadata.json: not JSON"),
    ("train/mask.bin", None, True, "lacks mask.bin"),
    ("train/tokens.bin", None, True, "lacks tokens.bin"),
]


@pytest.mark.parametrize(("name", "data", "metadata", "expected"), WRONG_EPISODES)
def test_episode_files_that_dont_fit_together_are_named(tmp_path, name, data, metadata, expected):
    path = write_episodes(tmp_path, documents(10), flat=True, dtype="uint16", metadata=metadata) / name
    path.unlink() if data is None else path.write_bytes(data)
    assert expected in error_of(tmp_path)


def test_documents_longer_than_a_block_and_out_of_order_are_read(tmp_path, monkeypatch):
    docs = documents(100)
    monkeypatch.setattr("grain_sft.corpus.corpus._BLOCK_TOKENS", 20)
    root = write_episodes(tmp_path, docs, flat=True)
    assert_documents(open_corpus(root), docs)
    path = root / "train" / "episodes.idx"
    order = np.random.default_rng(1).permutation(100)
    np.fromfile(path, "<u8").reshape(-1, 2)[order].tofile(path)
    assert_documents(open_corpus(root), [docs[number] for number in order])


@pytest.mark.parametrize("value", [-0.25, -np.inf, np.inf, np.nan])
def test_a_bad_weight_is_refused_when_it_is_read(tmp_path, value):
    weighted = write_episodes(tmp_path / "corpus", documents(3000, weights=True), flat=True) / "train"
    materialize(PackedLayout(open_corpus(weighted), 64), str(tmp_path / "rows"))
    path, rows = weighted / "mask_weighted.bin", open_corpus(tmp_path / "rows")
    for each in (path, rows.shards[0].loss.path):
        np.memmap(each, np.float32, "r+")[20_000] = value  # opening checks only values near the ends of the file
    corpus = open_corpus(weighted)
    for layout, name in (
        (PaddedLayout(corpus, 64), "mask_weighted.bin"),
        (PackedLayout(corpus, 64), "mask_weighted.bin"),
        (MaterializedLayout(rows), "loss_0000.bin"),
    ):
        with pytest.raises(GrainSftError, match=f"{name}: the weight of token 20000 is .*finite number, 0 or more"):
            NpyDataSource(layout).read(range(len(layout)))
    np.memmap(path, np.float32, "r+")[5] = value
    assert "expected a finite weight, 0 or more" in error_of(weighted)
