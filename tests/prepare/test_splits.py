"""`prepare` shuffles and splits records as `datasets` does, or as Python's `random` and numpy do with the same seed."""

import hashlib
import random
from typing import Any

import numpy as np
import pytest
from batches import golden_values

from grain_sft.errors import PrepareError
from grain_sft.prepare import Dataset, Request, splits

GOLDEN = golden_values("datasets_shuffle.json")["shuffle"]


def request(seed: int = 42, val_frac: float = 0.0, shuffle: bool | None = None, amount: str = "1.0") -> Request:
    return Request((Dataset(("a.jsonl",), amount),), "primer", "t", "olmo", seed=seed, val_frac=val_frac, shuffle=shuffle)


@pytest.mark.parametrize("case", list(GOLDEN))
def test_the_shuffle_is_that_of_the_library_datasets(case: str) -> None:
    size, seed = map(int, case.split(":"))
    found = splits.by_datasets_shuffle(np.arange(size), np.ones(size, bool), request(seed))["train"]
    assert found[:10].tolist() == GOLDEN[case]["first"]
    assert hashlib.sha256(found.astype("<i8").tobytes()).hexdigest() == GOLDEN[case]["sha256"]


def test_records_that_are_filtered_out_take_no_part_in_the_shuffle() -> None:
    kept = np.arange(20) % 3 > 0
    found = splits.by_datasets_shuffle(np.arange(20), kept, request())["train"]
    assert found.tolist() == np.flatnonzero(kept)[np.random.default_rng(42).permutation(int(kept.sum()))].tolist()


def test_primer_and_openchat_split_all_examples_before_they_drop_any() -> None:
    kept = ~np.isin(np.arange(50), [3, 17])
    found = splits.by_random_shuffle(np.arange(50), kept, request(9, 0.1))
    order = list(range(50))
    random.Random(9).shuffle(order)
    assert found["val"].tolist() == [row for row in order[:5] if kept[row]]
    assert found["train"].tolist() == [row for row in order[5:] if kept[row]]


def test_the_split_has_the_same_documents_with_and_without_a_shuffle() -> None:
    ids, kept = np.arange(30), np.ones(30, bool)
    for rule in (splits.by_datasets_shuffle, splits.by_random_shuffle, splits.by_random_state):
        shuffled, ordered = (rule(ids, kept, request(5, 0.2, shuffle)) for shuffle in (True, False))
        for name in ("train", "val"):
            assert sorted(shuffled[name].tolist()) == ordered[name].tolist()
        assert shuffled["train"].tolist() != ordered["train"].tolist()


def test_records_that_are_both_in_train_and_in_val_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    for amount, val_frac, repeated in (("1.0", 0.2, False), ("3.0", 0.0, False), ("3.0", 0.2, True)):
        splits.split([np.arange(10)], np.ones(10, np.uint32), request(42, val_frac, None, amount), splits.by_random_state)
        assert ("an amount repeats records" in caplog.text) is repeated
    splits.split([np.arange(9)], np.ones(9, np.uint32), request(val_frac=0.1), splits.by_random_state)
    assert "val_frac=0.1 of the documents is less than one" in caplog.text


@pytest.mark.parametrize("amount", ["9" * 20, f"{'9' * 300}.5"])
def test_an_amount_that_does_not_fit_in_memory_is_an_error(amount: str) -> None:
    with pytest.raises(PrepareError, match="too many documents"):
        splits.select(np.arange(7), amount)


@pytest.mark.parametrize("amount", ["", ".", "x", "-1", "1e", "nan.", "inf.", "1_000", "1" * 5000, 0.5])
def test_an_amount_that_is_neither_a_factor_nor_a_count_is_an_error(amount: Any) -> None:
    with pytest.raises(PrepareError, match="expected a factor"):
        request(amount=amount)
