"""NgramFilter passes the same padded rows as OLMo-core's filter. If it counts padding, it passes the same packed rows."""

import dataclasses
import hashlib

import numpy as np
import pytest
from batches import golden_values
from filter_corpora import EOS, PACKED_FILES, PAD, SEQUENCE_LENGTH, write_files

from grain_sft import NgramFilter, NpyDataSource, PackedLayout, PaddedLayout, open_corpus

GOLDEN = golden_values("olmo_filter_padding.json")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    corpus = open_corpus(write_files(tmp_path_factory.mktemp("documents")), dtype="uint16", eos_token_id=EOS)
    corpus = dataclasses.replace(corpus, pad_token_id=PAD)
    some = dataclasses.replace(corpus, shards=corpus.shards[:PACKED_FILES])
    padded = PaddedLayout(corpus, SEQUENCE_LENGTH, keep="first", min_tokens=1)
    return {"padded": NpyDataSource(padded), "packed": NpyDataSource(PackedLayout(some, SEQUENCE_LENGTH))}


def passes(filter, source):
    """Return which rows keep loss. Check that rows read one by one have the same verdicts as rows of a batch."""
    single = [filter.map(source[row])["loss_mask"].any() for row in range(0, len(source), 7)]
    kept = filter.map(source.read(range(len(source))))["loss_mask"].any(axis=1)
    assert kept[::7].tolist() == single
    return kept


@pytest.mark.parametrize(("kind", "count_padding"), [("padded", False), ("packed", True)])
def test_verdicts_on_rows_with_padding_are_those_of_olmo_core(sources, kind, count_padding):
    golden, source = GOLDEN[kind], sources[kind]
    tokens = source.read(range(len(source)))["tokens"]
    assert hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()[:16] == golden["tokens"]
    kept = passes(NgramFilter(count_padding=count_padding), source)
    np.testing.assert_array_equal(kept, np.array(list(golden["passes"])) == "1")


def test_padding_of_packed_rows_does_not_count_by_default(sources):
    source = sources["packed"]
    batch = source.read(range(len(source)))
    lengths = (batch["segment_ids"] != 0).sum(axis=1)
    alone = [NgramFilter().fails(row[:length]) for row, length in zip(batch["tokens"], lengths, strict=True)]
    kept = passes(NgramFilter(), source)
    np.testing.assert_array_equal(kept, ~np.array(alone))
    assert (kept & ~passes(NgramFilter(count_padding=True), source)).sum() > 50


@pytest.mark.parametrize("place", ["left", "middle", "right"])
def test_padding_anywhere_in_a_row_does_not_count_as_a_repetition(place):
    tokens, segments = np.arange(1, 601, dtype=np.uint32), np.ones(600, np.int32)
    at = {"left": 0, "middle": 200, "right": 560}[place]
    tokens[at : at + 40], segments[at : at + 40] = 0, 0
    assert not NgramFilter().fails(tokens, segments) and NgramFilter(count_padding=True).fails(tokens, segments)
    tokens[300:332] = 9  # repeats of the row's own tokens still fail it
    assert NgramFilter().fails(tokens, segments)
