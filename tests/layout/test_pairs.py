"""Preference pairs are read from a corpus. They become rows, and then the arrays that DPO trainers expect.

A pair is a prompt, a chosen response and a rejected response.
"""

import hashlib

import numpy as np
import pytest
from batches import error_of, load, sections
from sft_files import PAD, documents, make_pairs, write_episodes, write_pairs

from grain_sft import GrainSftError, NpyDataSource, open_corpus
from grain_sft.layout import PairsLayout
from grain_sft.transforms import SplitPairs

COLUMNS = ("prompt", "chosen", "rejected")
MAXTEXT = "19e773edd2c9abbfd08044a6d0e534ae0920039b85f95303f9524d2d445acdf0"
"""`digest_of` the arrays that maxtext 0.2.5's `DPODataFormatting` makes of `make_pairs(1100, 1)`. Prompts have 16 tokens."""


def digest_of(elements):
    """Return a hash of the arrays of all elements, in the order of their keys."""
    found = hashlib.sha256()
    for element in elements:
        for key in sorted(element):
            found.update(np.ascontiguousarray(element[key]).tobytes())
    return found.hexdigest()


def config_of(folder, **layout):
    sampler = {"order": "sequential", "seed": 3, "global_batch_size": 8, "epochs": 1, "last_batch": "fill"}
    return sections(folder, 48, layout={"kind": "pairs", "prompt_length": 16, **layout}, **sampler)


def test_batches_have_the_arrays_that_maxtext_makes_of_the_pairs(tmp_path):
    pairs = make_pairs(1100, 1)
    found = list(load(config_of(write_pairs(tmp_path, pairs))).iter())
    shapes = {f"{name}_{kind}": (8, 16 if name == "prompt" else 32) for name in COLUMNS for kind in ("ids", "mask")}
    assert {key: array.shape for key, array in found[0].items()} == shapes
    assert {array.dtype for array in found[0].values()} == {np.dtype(np.int32)}
    rows = {key: np.concatenate([batch[key] for batch in found]) for key in found[0]}
    assert digest_of({key: rows[key][number] for key in rows} for number in range(len(pairs))) == MAXTEXT


@pytest.mark.maxtext
def test_the_golden_digest_is_that_of_the_installed_maxtext():
    formatting = pytest.importorskip("maxtext.input_pipeline.dpo_utils").DPODataFormatting(PAD, 48, COLUMNS, 16)
    pairs = (dict(zip(COLUMNS, pair, strict=True)) for pair in make_pairs(1100, 1))
    assert digest_of(map(formatting.map, pairs)) == MAXTEXT


def test_long_pairs_are_dropped_or_truncated_and_counted(tmp_path):
    pairs = make_pairs(200, 2)
    corpus = open_corpus(write_pairs(tmp_path, pairs))
    fits = [len(prompt) <= 16 and max(len(chosen), len(rejected)) <= 32 for prompt, chosen, rejected in pairs]
    assert 0 < sum(fits) < len(pairs)
    dropped = PairsLayout(corpus, 48, prompt_length=16, long_pairs="drop")
    truncated = PairsLayout(corpus, 48, prompt_length=16)
    assert (len(dropped), len(truncated)) == (sum(fits), len(pairs))
    counts = {what: numbers for what, *numbers in truncated.left_out()}
    total = sum(len(ids) for pair in pairs for ids in pair)
    kept = sum(min(len(p), 16) + min(len(c), 32) + min(len(r), 32) for p, c, r in pairs)
    assert counts["truncated pairs"] == [len(pairs) - sum(fits), total - kept]
    # The arrays of a pair have room for 80 tokens: 16 of the prompt and 32 of each response.
    assert counts["padding of rows"] == [None, len(pairs) * 80 - kept] and truncated.statistics["tokens"] == kept
    assert {what: count for what, count, _ in dropped.left_out()}["dropped pairs"] == len(pairs) - sum(fits)


@pytest.mark.parametrize("long_pairs", ["drop", "truncate"])
def test_a_pair_without_a_token_has_no_row(long_pairs, tmp_path):
    corpus = open_corpus(write_pairs(tmp_path / "some", [[[], [], []], [[5], [6], [7]]], shards=1))
    layout = PairsLayout(corpus, 8, long_pairs=long_pairs)
    assert [span.document for span in layout.spans(0)] == [1, 1, 1] and len(layout) == 1


def test_each_option_changes_the_receipt(tmp_path):
    write_pairs(tmp_path, make_pairs(50, 3))
    options = ({}, {"prompt_length": 8}, {"long_pairs": "drop"}, {"sequence_length": 40})
    assert len({load(config_of(tmp_path, **each)).receipt.code for each in options}) == len(options)


def test_wrong_options_and_documents_that_are_not_pairs_are_errors(tmp_path):
    corpus = open_corpus(write_pairs(tmp_path, make_pairs(20, 5)))
    for options, message in (
        ({"sequence_length": 1}, "sequence_length=1: expected an integer, 2 or more"),
        ({"prompt_length": 48}, "prompt_length=48: expected 1 to 47"),
        ({"long_pairs": "cut"}, "long_pairs='cut': expected one of truncate, drop"),
    ):
        with pytest.raises(GrainSftError, match=message):
            PairsLayout(corpus, **{"sequence_length": 48} | options)
    np.arange(64, dtype=np.uint32).tofile(tmp_path / "a.npy")
    with pytest.raises(GrainSftError, match="its documents are not preference pairs"):
        PairsLayout(open_corpus(tmp_path / "a.npy", dtype="uint32", eos_token_id=2), 48)
    with pytest.raises(GrainSftError, match="are not pairs with prompts of at most 8 tokens"):
        SplitPairs(8, PAD).map(NpyDataSource(PairsLayout(corpus, 48)).read(range(8)))


def test_token_files_of_pairs_open_as_a_list_or_a_mix_but_make_no_rows_with_other_files(tmp_path):
    corpus = open_corpus(write_pairs(tmp_path / "pairs", make_pairs(20, 5)))
    paths = [shard.path for shard in corpus.shards]
    (tmp_path / "mix.txt").write_text("".join(f"a,{path}\n" for path in paths))
    for where in (paths, [tmp_path / "pairs"], f"{tmp_path}/pairs/train/shard_*/*", tmp_path / "mix.txt"):
        found = open_corpus(where)
        assert found.fingerprint == corpus.fingerprint
        pieces, expected = (PairsLayout(each, 48).pieces(np.arange(20)) for each in (found, corpus))
        np.testing.assert_array_equal(pieces, expected)
    episodes = open_corpus(write_episodes(tmp_path / "episodes", documents()))
    for first, second in ((corpus, episodes), (episodes, corpus)):
        both = open_corpus([shard.path for each in (first, second) for shard in each.shards])
        with pytest.raises(GrainSftError, match=f"{episodes.shards[0].path}: its documents are not preference pairs"):
            PairsLayout(both, 48)


def test_transforms_that_would_train_on_other_tokens_are_refused(tmp_path):
    config = config_of(write_pairs(tmp_path, [[[5], [6, 2], [7, 2]]] * 8, shards=1))
    masks = {"mask_eod": {"eod_token_id": 2, "as_target": True}}
    split = {"split_pairs": {"prompt_length": 16, "pad_token_id": PAD}}
    with pytest.raises(GrainSftError, match=r"the token at \[0, 2\] takes no loss, but trainers of pairs"):
        load({**config, "transforms": [masks, split]})[0]
    assert "would train on the pairs' rejected responses" in error_of(config | {"transforms": ["shift_targets"]})


def test_a_token_that_is_the_padding_token_is_masked_with_a_warning(tmp_path, caplog):
    corpus = open_corpus(write_pairs(tmp_path, [[[5, PAD], [6], [7]]], shards=1))
    element = NpyDataSource(PairsLayout(corpus, 8)).read([0])
    assert SplitPairs(4, PAD).map(element)["prompt_mask"].tolist() == [[0, 0, 1, 0]]
    assert "prompt_ids: a text holds the padding token." in caplog.text


def test_tokens_and_padding_beyond_their_dtype_are_widened_or_refused():
    segments = np.array([1, 1, 2, 2, 3, 0], np.int32)
    element = {"tokens": np.arange(6, dtype=np.uint16), "loss_mask": segments > 1, "segment_ids": segments}
    batch = SplitPairs(2, 70_000).map(element)
    assert batch["rejected_ids"].tolist() == [4, 70_000] and batch["rejected_mask"].tolist() == [1, 0]
    with pytest.raises(GrainSftError, match=r"a token id at \[0\] of the batch is above"):
        SplitPairs(2, 0).map({**element, "tokens": np.full(6, 2**31, np.uint32)})
    with pytest.raises(GrainSftError, match="pad_token_id=2147483648: expected at most"):
        SplitPairs(2, 2**31)


def test_the_error_of_a_damaged_index_names_the_file(tmp_path):
    folder = write_pairs(tmp_path, make_pairs(20, 6), shards=1)
    index = folder / "train" / "shard_00000" / "pairs.idx"
    whole = index.read_bytes()
    for data, message in ((whole[:-8], "is not a multiple of 32"), (whole[:-8] + b"\xff" * 8, "damaged: pair 19")):
        index.write_bytes(data)
        with pytest.raises(GrainSftError, match=f"{index}.*{message}"):
            PairsLayout(open_corpus(folder), 48)
