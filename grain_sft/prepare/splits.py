"""Rules that divide documents into the splits train and val, and order each split. Each rule is that of an older tool."""

import array
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from absl import logging

from grain_sft.errors import PrepareError
from grain_sft.prepare.documents import Ids
from grain_sft.prepare.request import Request, parse_amount

SELECT_SEED = 42
"""Seed of open-instruct's choice among a dataset's samples (`DatasetConfig.dataset_config_seed`)."""

Splits = dict[str, Ids]
"""Numbers of the documents of each split, in order: "train", and "val" if there is one."""


def select(ids: Ids, amount: str) -> Ids:
    """Return the documents that `amount`, a factor or a count, selects from a dataset.

    Amount "2.5" selects the whole dataset twice, in order, and then a random half of it. Open-instruct's
    `DatasetConfig.select_samples` (dataset_transformation.py) selects the same documents.
    """
    value = parse_amount(amount)
    target = int(value * len(ids)) if isinstance(value, float) else value
    if not len(ids) or target == len(ids):
        return ids
    repeats, num_random = divmod(target, len(ids))
    chosen = np.random.RandomState(SELECT_SEED).choice(len(ids), size=num_random, replace=False)
    try:
        return np.concatenate([*[ids] * repeats, ids[chosen]])
    except (MemoryError, OverflowError) as error:
        raise PrepareError(f"amount {amount}: too many documents for the memory. Give a smaller amount.") from error


def by_datasets_shuffle(ids: Ids, kept: npt.NDArray[np.bool_], request: Request) -> Splits:
    """Shuffle the kept documents as open-instruct does, by the permutation of Hugging Face's `datasets.Dataset.shuffle(seed)`.

    Open-instruct makes no split val. Here, the first documents of the permutation are val.
    """
    order = np.random.default_rng(request.seed).permutation(int(kept.sum()))
    # only kept documents are passed, so their mask, `kept[kept]`, is all True
    return _divide(ids[kept], kept[kept], order, request, request.shuffle is not False)


def by_random_shuffle(ids: Ids, kept: npt.NDArray[np.bool_], request: Request) -> Splits:
    """Split as Primer and OpenChat do: shuffle all documents, and leave out the dropped ones afterwards."""
    order = array.array("q", range(len(ids)))
    random.Random(request.seed).shuffle(order)
    return _divide(ids, kept, np.frombuffer(order, np.int64), request, request.shuffle is not False)


def by_random_state(ids: Ids, kept: npt.NDArray[np.bool_], request: Request) -> Splits:
    """Split as format `episodes` does: choose the documents of val at random. Shuffle the splits only on request."""
    order = np.random.RandomState(request.seed).permutation(len(ids))
    return _divide(ids, kept, order, request, request.shuffle is True)


Rule = Callable[[Ids, npt.NDArray[np.bool_], Request], Splits]
"""Function of the selected documents, their mask (True for a kept document, False for a dropped one), and the request."""


def split(datasets: Sequence[Ids], lengths: npt.NDArray[np.uint32], request: Request, rule: Rule) -> Splits:
    """Return the splits of all datasets together. `lengths` has the number of tokens of each document, 0 for a dropped one."""
    selected = [select(ids, dataset.amount) for ids, dataset in zip(datasets, request.datasets, strict=True)]
    ids = selected[0] if len(selected) == 1 else np.concatenate(selected)
    splits = rule(ids, lengths[ids] > 0, request)
    has_repeats = any(len(part) > len(dataset) for part, dataset in zip(selected, datasets, strict=True))
    if request.val_frac and "val" not in splits:
        problem = f"val_frac={request.val_frac} of the documents is less than one, so all documents are in train"
        logging.warning("%s. Give a larger val_frac to have one.", problem)
    if has_repeats and "val" in splits:
        problem = "an amount repeats records, so some records of val are probably in train, too"
        logging.warning("%s. To validate on unseen records, prepare other files for val.", problem)
    return splits


def _divide(ids: Ids, kept: npt.NDArray[np.bool_], order: Ids, request: Request, shuffled: bool) -> Splits:
    """Return the first documents of `order` as "val", and the others as "train". Leave out documents that are not kept.

    For 10 documents and a `val_frac` of 0.25, "val" has the first 2 documents of `order`, if they are kept. If `val_frac` of
    the documents is less than one document, the result has no "val".

    `order` is a permutation of the indices of `ids`. If `shuffled`, a split has the order of `order`, else the order of `ids`.
    """
    num_val = int(len(ids) * request.val_frac)
    parts = {"train": order[num_val:], "val": order[:num_val]} if num_val else {"train": order}
    ordered = {name: part if shuffled else np.sort(part) for name, part in parts.items()}
    return {name: ids[indices[kept[indices]]] for name, indices in ordered.items()}
