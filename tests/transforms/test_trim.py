"""`TrimToMultiple` cuts columns that are padding in every row. Its batches have only the shapes that it lists."""

import numpy as np
import pytest
from batches import assert_same, pipeline_of

from grain_sft import NgramFilter, NpyDataSource, PaddedLayout, ShiftTargets, open_corpus
from grain_sft.errors import TransformError
from grain_sft.transforms import TrimToMultiple

LENGTH = 100


@pytest.fixture
def source(write_tokens):
    rng = np.random.default_rng(0)
    docs = [np.append(rng.integers(3, 99, size), 2) for size in rng.integers(1, 120, 60)]
    path = write_tokens("a.npy", np.concatenate(docs), "uint16")
    return NpyDataSource(PaddedLayout(open_corpus(path, dtype="uint16", eos_token_id=2), LENGTH))


@pytest.mark.parametrize("multiple", [1, 16, 64, 100, 128])
@pytest.mark.parametrize("after", [False, True])
def test_padding_is_cut_to_the_next_multiple_and_no_token_is_cut(source, multiple, after):
    trim = TrimToMultiple(multiple)
    order = [NgramFilter(), ShiftTargets(), trim] if after else [NgramFilter(), trim, ShiftTargets()]
    options = {"global_batch_size": 3, "order": "shuffle", "epochs": 1}
    whole = pipeline_of(source.layout, [NgramFilter(), ShiftTargets()], **options)
    trimmed = pipeline_of(source.layout, order, **options)
    shapes = set()
    for step in range(len(whole)):
        longest = int((whole[step]["inputs_segmentation"] != 0).sum(axis=1).max())
        kept = min(LENGTH, -(-longest // multiple) * multiple)
        expected = {key: array[:, :kept].copy() for key, array in whole[step].items()}
        if not after:
            expected["targets"][:, -1] = 0  # the next token was cut off before targets were made
        assert_same(trimmed[step], expected)
        assert not whole[step]["inputs_segmentation"][:, kept:].any()
        assert_same(trimmed.read(step, np.array([2, 0])), {key: array[[2, 0]] for key, array in trimmed[step].items()})
        shapes.add((3, kept))
    listed = trim.shapes(source.layout, 3)
    assert shapes <= set(listed) and listed == sorted(set(listed)) and listed[-1] == (3, LENGTH)
    assert len(listed) == -(-LENGTH // multiple)


def test_rows_and_batches_of_padding_are_trimmed_and_a_batch_with_a_full_row_is_returned_as_it_is(source):
    trim = TrimToMultiple(16)
    for row in range(5):
        assert_same(trim.map(source[row]), {key: array[0] for key, array in trim.map(source.read([row])).items()})
    numbers = np.arange(40)
    batch = trim.map(source.read(np.full(40, -1)) | {"row_number": numbers, "n": 3})
    assert batch["tokens"].shape == (40, 16) and batch["row_number"] is numbers
    batch = trim.map(source.read([-1, -1]))
    assert batch["tokens"].shape == (2, 16) and not batch["loss_mask"].any()
    lengths = (source.read(range(len(source)))["segment_ids"] != 0).sum(axis=1)
    element = source.read([int(lengths.argmax()), 0])
    assert trim.map(element) is element


def test_the_error_of_a_batch_without_segments_names_the_missing_key():
    with pytest.raises(TransformError, match="needs the key 'inputs_segmentation'"):
        TrimToMultiple().map({"tokens": np.zeros((2, 8), np.uint32)})
