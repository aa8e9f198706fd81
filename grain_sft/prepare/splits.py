"""Splits: which documents are in "train" and "val", and in which order, exactly as each format's own tool decides."""

import array
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from absl import logging

from grain_sft.prepare.documents import Ids
from grain_sft.prepare.request import Request, parse_amount

SELECT_SEED = 42
"""Seed of open-instruct's choice among a dataset's samples (`DatasetConfig.dataset_config_seed`)."""

Splits = dict[str, Ids]
"""Documents of "train", and of "val" if the split has any, in order."""


def select(ids: Ids, amount: str) -> Ids:
    """Return `amount` of a dataset, like open-instruct's `DatasetConfig.select_samples` (dataset_transformation.py): the whole
    dataset as often as it fits, in order, then a random choice without replacement for the rest."""
    value = parse_amount(amount)
    target = int(value * len(ids)) if isinstance(value, float) else value
    if not len(ids) or target == len(ids):
        return ids
    repeats, rest = divmod(target, len(ids))
    parts = [ids] * repeats
    if rest:
        parts.append(ids[np.random.RandomState(SELECT_SEED).choice(len(ids), size=rest, replace=False)])
    return np.concatenate(parts) if parts else ids[:0]


def by_datasets_shuffle(ids: Ids, kept: npt.NDArray[np.bool_], request: Request) -> Splits:
    """Split as open-instruct does: drop documents, then order the others like `datasets.Dataset.shuffle(seed)`, which is
    numpy's `default_rng(seed).permutation`. The first share of that order is "val", which open-instruct itself lacks."""
    order = np.random.default_rng(request.seed).permutation(int(kept.sum()))
    return _divide(ids[kept], kept[kept], order, request, request.shuffle is not False)


def by_random_shuffle(ids: Ids, kept: npt.NDArray[np.bool_], request: Request) -> Splits:
    """Split as Primer and OpenChat do: shuffle all examples by `random.Random(seed).shuffle`, take the first share for "val",
    and only then drop documents for their length."""
    order = array.array("q", range(len(ids)))
    random.Random(request.seed).shuffle(order)
    return _divide(ids, kept, np.frombuffer(order, np.int64), request, request.shuffle is not False)


def by_random_state(ids: Ids, kept: npt.NDArray[np.bool_], request: Request) -> Splits:
    """Split as the episode tools do: "val" is the first share of numpy's `RandomState(seed).permutation`. Both splits keep the
    order of the input, unless the request asks for a shuffle."""
    order = np.random.RandomState(request.seed).permutation(len(ids))
    return _divide(ids, kept, order, request, request.shuffle is True)


Rule = Callable[[Ids, npt.NDArray[np.bool_], Request], Splits]


def split(datasets: Sequence[Ids], lengths: npt.NDArray[np.uint32], request: Request, rule: Rule) -> Splits:
    """Return the splits of all datasets together, by a format's rule. `lengths` holds every document's tokens, 0 if dropped."""
    amounts = [dataset.amount for dataset in request.datasets]
    parts = [select(part, amount) for part, amount in zip(datasets, amounts, strict=True)]
    ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
    found = rule(ids, lengths[ids] > 0, request)
    repeated = any(len(part) > len(dataset) for part, dataset in zip(parts, datasets, strict=True))
    if repeated and "val" in found:
        logging.warning(
            "an amount repeats records, so some records of val are probably in train too. For a validation of unseen records, "
            "prepare them from files of their own."
        )
    return found


def _divide(ids: Ids, kept: npt.NDArray[np.bool_], order: Ids, request: Request, shuffled: bool) -> Splits:
    """Return the first share of `order` as "val", if that is at least one document, and the rest as "train". Documents that are
    not kept count for the share and are then left out. Unless `shuffled`, each split has the order of `ids`."""
    count = int(len(ids) * request.val_frac)
    parts = {"train": order[count:], "val": order[:count]} if count else {"train": order}
    parts = {name: part if shuffled else np.sort(part) for name, part in parts.items()}
    return {name: ids[part[kept[part]]] for name, part in parts.items()}
