"""What transforms ask of the dict that they are given, and what others ask of transforms."""

from grain_sft.errors import TransformError
from grain_sft.source import Element


def require_keys(transform: object, element: Element, keys: tuple[str, ...]) -> None:
    """Raise a `TransformError` where `element` lacks one of `keys`."""
    for key in keys:
        if key not in element:
            raise TransformError(
                f"{transform!r} needs the key {key!r} and was given {', '.join(map(repr, element))}. "
                "ShiftTargets makes a batch of the source's dict, so what takes that dict comes before it."
            )


def trait(transform: object, name: str) -> bool:
    """Return whether a transform has a trait, an attribute of its class; a grain `Map` without the attribute does not have it.

    Args:
      name: One of
        "shifts_targets": makes a trainer's batch of the source's dict;
        "splits_rows": makes arrays of other lengths than the sequence length, the same in every batch;
        "trims_columns": changes nothing but the length of rows;
        "cuts_columns": cuts the same columns off every batch;
        "divides_segments": divides the segments of the batch into shorter ones;
        "positions_apart": makes positions that do not follow the segments;
        "filters_repetition": has `fails(tokens, segment_ids)`, and takes the loss off rows that fail.
    """
    return bool(getattr(transform, name, False))
