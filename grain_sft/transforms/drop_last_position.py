"""`DropLastPosition`: a transform that cuts the last column of a batch, as in nanoGPT's batches."""

import grain
import numpy as np

from grain_sft.source import Element
from grain_sft.transforms.element import first_columns, require_keys


class DropLastPosition(grain.transforms.Map):
    """Transform that cuts the last column off a batch of `ShiftTargets`, because that column has no targets.

    Rows of L + 1 tokens become batches [rows, L] with inputs `tokens[:L]` and targets `tokens[1:]`. The arrays are contiguous.
    """

    cuts_columns = True  # see `trait`
    # see `column_reach` in element.py; for columns 0 to 9 of the output, `map` needs columns 0 to 10, and cuts column 10
    column_reach = (0, 1)

    def map(self, element: Element) -> Element:
        """Return `element` without its last column.

        Raises:
          TransformError: `element` has no targets: `ShiftTargets` has to come before this transform.
        """
        require_keys(self, element, ("targets",))
        cut = first_columns(element, element["targets"].shape, -1)
        return {name: np.asarray(array, order="C") for name, array in cut.items()}

    def __repr__(self) -> str:
        return "DropLastPosition()"
