"""`TrimToMultiple`: a transform that cuts off columns of padding."""

import grain
import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import TransformError
from grain_sft.layout import Layout
from grain_sft.source import Element
from grain_sft.transforms.element import first_columns, require_keys


class TrimToMultiple(grain.transforms.Map):
    """Transform that cuts off the last columns of a batch if they are padding in all rows.

    The transform leaves a multiple of `multiple` columns, or all columns. With 64, a batch keeps 128 columns if its longest row
    has 100 tokens, and 64 if it has no tokens. OpenChat pads its batches in this way. The transform takes the source's dict or
    a batch of ShiftTargets. Put it after transforms that need whole rows, such as NgramFilter.

    Advantages: nothing is computed on columns that are only padding. Disadvantages: a TPU compiles the training step for each
    shape that `shapes` lists. The transform is for one host, because two hosts would cut their rows to different lengths. For
    several hosts, use packed rows.

    Args:
      multiple: Divisor of the number of columns. OpenChat uses 64; a TPU's attention kernels need 128 or 512.
    """

    trims_columns = True

    def __init__(self, multiple: int = 64) -> None:
        self.multiple = as_integer("TrimToMultiple: multiple", multiple, 1, TransformError)

    def map(self, element: Element) -> Element:
        """Return `element` with views of its arrays, all cut to one length, or `element` itself if no column is cut."""
        key = "segment_ids" if "segment_ids" in element else "inputs_segmentation"
        require_keys(self, element, (key,))
        segments = element[key]
        length = segments.shape[-1]
        # last column with a token in any row; 0 if no row has a token
        last = int(np.flatnonzero(segments.reshape(-1, length).any(axis=0)).max(initial=0))
        kept = min(length, (last // self.multiple + 1) * self.multiple)
        if kept == length:
            return element
        return first_columns(element, segments.shape, kept)

    def shapes(self, layout: Layout, rows: int) -> list[tuple[int, int]]:
        """Return every shape that `map` may return for `rows` whole rows of `layout`, shortest first."""
        length = layout.sequence_length
        return [(rows, min(kept, length)) for kept in range(self.multiple, length + self.multiple, self.multiple)]

    def __repr__(self) -> str:
        return f"TrimToMultiple({self.multiple})"
