"""Helpers of transforms: checks of transforms and of their input dicts, and the attributes that describe a transform."""

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.arguments import check_type
from grain_sft.errors import PipelineError, TransformError
from grain_sft.source import Element

INT32_MAX = np.iinfo(np.int32).max


def require_keys(transform: object, element: Element, keys: tuple[str, ...]) -> None:
    """Raise a `TransformError` if `element` lacks one of `keys`."""
    for key in keys:
        if key not in element:
            problem = f"{transform!r} needs the key {key!r}, but the dict has {', '.join(map(repr, element))}"
            fix = "ShiftTargets turns the source's dict into a batch: place this transform on the other side of ShiftTargets"
            raise TransformError(f"{problem}. {fix}.")


def first_columns(element: Element, shape: tuple[int, ...], count: int) -> Element:
    """Return `element` with its arrays cut to the first `count` columns, as views. A `count` of -1 cuts the last column.

    Only arrays whose shape begins with `shape`, which is [L] or [rows, L], are cut.
    """
    cut = (*[slice(None)] * (len(shape) - 1), slice(count))  # [:count] for [L], and [:, :count] for [rows, L]
    return {name: array[cut] if np.shape(array)[: len(shape)] == shape else array for name, array in element.items()}


def as_int32(tokens: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return `tokens` as int32, without a copy if their dtype has 32 bits. Raise a `TransformError` if a token does not fit."""
    # every value of a narrower dtype fits
    if tokens.dtype.itemsize >= 4 and tokens.size and int(tokens.max()) > INT32_MAX:
        place = np.argwhere(tokens > INT32_MAX)[0].tolist()
        found = f"a token id at {place} of the batch is above {INT32_MAX}: no vocabulary has it"
        raise TransformError(f"{found}. The corpus was opened with the wrong dtype or holds no tokens. Fix `dtype`.")
    return tokens.view(np.int32) if tokens.dtype == np.uint32 else tokens.astype(np.int32, copy=False)


def check_maps(transforms: Sequence[object]) -> None:
    """Raise a `PipelineError` if one of a pipeline's transforms is not a grain `Map`."""
    check_type("transforms", transforms, Sequence, "a list, such as [ShiftTargets()]")
    for transform in transforms:
        if isinstance(transform, type) and issubclass(transform, grain.transforms.Map):
            name = transform.__name__
            raise PipelineError(f"transform {name} is a class; expected an object. Write {name}().")
        if not isinstance(transform, grain.transforms.Map):
            raise PipelineError(
                f"transform {transform!r} is not a grain.transforms.Map. Remove a Batch, because a pipeline reads whole "
                "batches. Remove a Filter, because a pipeline keeps every row. Remove a RandomMap, because only the step "
                "decides a batch."
            )


def column_reach(transforms: Sequence[object]) -> tuple[int, int] | None:
    """Return the pair (before, after) for a chain of transforms: how far a column of the output reaches in the input.

    Column c of the output depends on columns c - before to c + after of the input. The result None means that a column may
    depend on any column. A transform states its own two numbers as `column_reach`: (0, 1) for `ShiftTargets`, which reads the
    next token. A subclass that overrides `map` has to state `column_reach` again.
    """
    before = after = 0
    for transform in transforms:
        reach = getattr(transform, "column_reach", None)
        if reach is None or not issubclass(_definer(transform, "column_reach"), _definer(transform, "map")):
            return None
        before, after = before + reach[0], after + reach[1]
    return before, after


def _definer(transform: object, name: str) -> type:
    """Return the class or base class of `transform` that defines the attribute `name`; `object` if none does."""
    return next((cls for cls in type(transform).__mro__ if name in vars(cls)), object)


def trait(transform: object, name: str) -> bool:
    """Return whether a transform has a trait: its attribute `name` exists and is true.

    Args:
      name: Name of the trait:
        - "shifts_targets": the transform turns the source's dict into a trainer's batch;
        - "splits_rows": the transform returns arrays whose lengths differ from the sequence length, but not between batches;
        - "trims_columns": the transform cuts off the last columns that are padding in all rows, so lengths of batches
          differ;
        - "cuts_columns": the transform cuts the same columns off every batch;
        - "divides_segments": the transform divides segments of the batch into shorter segments;
        - "positions_apart": after the transform, positions need not restart where a segment begins, or may restart inside it;
        - "filters_repetition": the transform has a method `fails(tokens, segment_ids)`, and takes the loss off rows that
          fail.
    """
    return bool(getattr(transform, name, False))
