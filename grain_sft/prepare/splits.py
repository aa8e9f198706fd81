"""Rules that divide documents into the splits train and val, and order them, as each format's own tool does."""

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
"""Numbers of the documents of "train" and, if documents are held out, of "val", in order."""


def select(ids: Ids, amount: str) -> Ids:
    """Return the documents that `amount`, a factor or a count as text, selects from a dataset.

    Amount "2.5" selects the whole dataset twice, in order, then a random half of it. The choice is that of open-instruct's
    `DatasetConfig.select_samples` (dataset_transformation.py).
    """
    value = parse_amount(amount)
    target = int(value * len(ids)) if isinstance(value, float) else value
    if not len(ids) or target == len(ids):
        return ids
    repeats, num_random = divmod(target, len(ids))
    parts = [ids] * repeats
    if num_random:
        parts.append(ids[np.random.RandomState(SELECT_SEED).choice(len(ids), size=num_random, replace=False)])
    return np.concatenate(parts) if parts else ids[:0]


def by_datasets_shuffle(ids: Ids, kept: npt.NDArray[np.bool_], request: Request) -> Splits:
    """Order documents as open-instruct does: leave out those that are not kept, then order the others like
    `datasets.Dataset.shuffle(seed)`, which is numpy's `default_rng(seed).permutation`. The first share of that order is "val".
    open-instruct itself has no "val"."""
    order = np.random.default_rng(request.seed).permutation(int(kept.sum()))
    # `ids[kept]` holds kept documents only; `kept[kept]` is as long, and all true
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
"""Function that returns the splits. Its arguments: the numbers of all documents; whether each document is kept, bool
[documents]; the request."""


def split(datasets: Sequence[Ids], lengths: npt.NDArray[np.uint32], request: Request, rule: Rule) -> Splits:
    """Return the splits of all datasets together, by a format's rule. `lengths`: tokens of each document; 0: dropped."""
    selected = [select(ids, dataset.amount) for ids, dataset in zip(datasets, request.datasets, strict=True)]
    ids = selected[0] if len(selected) == 1 else np.concatenate(selected)
    splits = rule(ids, lengths[ids] > 0, request)
    has_repeats = any(len(part) > len(dataset) for part, dataset in zip(selected, datasets, strict=True))
    if has_repeats and "val" in splits:
        logging.warning(
            "an amount repeats records, so some records of val are probably in train too. For a validation of unseen "
            "records, prepare them from files of their own."
        )
    return splits


def _divide(ids: Ids, kept: npt.NDArray[np.bool_], order: Ids, request: Request, shuffled: bool) -> Splits:
    """Return the share `val_frac` of the documents as "val", and the others as "train".

    The share is counted first; documents that are not `kept` are then left out of both splits. If the share is less than one
    document, as with `val_frac` 0.05 and 10 documents, the result has no "val".

    Args:
      ids: Numbers of the documents.
      kept: Whether each document of `ids` is kept.
      order: Permutation of the indices of `ids`. Its first share is "val".
      request: Request.
      shuffled: Whether the documents of a split are in the order of `order`. Otherwise they are in the order of `ids`.
    """
    num_val = int(len(ids) * request.val_frac)
    parts = {"train": order[num_val:], "val": order[:num_val]} if num_val else {"train": order}
    splits: Splits = {}
    for name, part in parts.items():
        indices = part if shuffled else np.sort(part)
        splits[name] = ids[indices[kept[indices]]]  # numbers of those documents of the part that are kept
    return splits
