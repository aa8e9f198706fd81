"""`ShiftTargets` makes the targets of a row or of a batch: the token after each input, its segment and its weight."""

import numpy as np
import pytest

from grain_sft import GrainSftError, ShiftTargets

KEYS = {f"{kind}{of}" for kind in ("inputs", "targets") for of in ("", "_position", "_segmentation")}


def packed_row():
    """Return a row of two documents, of 4 and 3 tokens, and one token of padding. The second token of each takes no loss."""
    return {
        "tokens": np.array([11, 12, 13, 14, 21, 22, 23, 0], np.uint16),
        "loss_mask": np.array([1, 0, 1, 1, 1, 0, 1, 0], np.bool_),
        "segment_ids": np.array([1, 1, 1, 1, 2, 2, 2, 0], np.int32),
        "positions": np.array([0, 1, 2, 3, 0, 1, 2, 0], np.int32),
        "loss_weights": np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32),
    }


def test_loss_is_taken_on_targets_of_the_same_segment_that_are_not_masked():
    batch = ShiftTargets().map(packed_row())
    assert set(batch) == KEYS | {"targets_weights"}
    assert batch["inputs"].tolist() == [11, 12, 13, 14, 21, 22, 23, 0]
    assert batch["targets"].tolist() == [12, 13, 14, 21, 22, 23, 0, 0]
    assert batch["inputs_segmentation"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert batch["targets_segmentation"].tolist() == [0, 1, 1, 0, 0, 2, 0, 0]
    assert batch["inputs_position"].tolist() == batch["targets_position"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch["targets_weights"].tolist() == [0, 3, 4, 0, 0, 7, 0, 0]


def test_a_loss_mask_of_integers_is_read_as_booleans():
    row = packed_row()
    expected = ShiftTargets().map(row)["targets_segmentation"].tolist()
    assert ShiftTargets().map({**row, "loss_mask": row["loss_mask"] * 2})["targets_segmentation"].tolist() == expected


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int32])
def test_tokens_of_every_dtype_become_int32(dtype):
    row = {**packed_row(), "tokens": np.arange(8, dtype=dtype)}
    del row["loss_weights"]
    batch = ShiftTargets().map(row)
    assert set(batch) == KEYS
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    assert batch["targets"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize(("dtype", "token"), [(np.uint32, 1 << 31), (np.uint32, 2**32 - 1), (np.uint64, 1 << 40)])
def test_the_error_of_a_token_that_int32_cannot_hold_names_its_place(dtype, token):
    row = {**packed_row(), "tokens": np.zeros((2, 8), dtype)}
    row["tokens"][1, 5] = token
    with pytest.raises(GrainSftError, match=r"\[1, 5\].*wrong dtype"):
        ShiftTargets().map(row)
