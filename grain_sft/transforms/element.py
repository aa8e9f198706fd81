"""What transforms ask of the dict that they are given."""

from __future__ import annotations

from grain_sft.errors import TransformError
from grain_sft.source import Element


def require_keys(transform: object, element: Element, keys: tuple[str, ...]) -> None:
    """Check that `element` is a source's dict as `transform` needs it.

    Raises:
      TransformError: a key is missing.
    """
    for key in keys:
        if key not in element:
            raise TransformError(
                f"{transform!r} needs the key {key!r} and was given {', '.join(map(repr, element))}. "
                "ShiftTargets makes a batch of the source's dict, so what takes that dict comes before it."
            )
