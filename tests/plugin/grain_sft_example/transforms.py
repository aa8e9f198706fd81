"""A transform of the plugin, with options that are not integers."""

from typing import Any

import grain
import numpy as np


class MaskTokens(grain.transforms.Map):
    """A map that removes the loss of listed tokens, except in rows where more than `share` of the targets are listed.

    Args:
      tokens: Lists of token ids, each with a name that the user chooses.
      share: Largest share of listed targets in a row, from 0 to 1.
    """

    def __init__(self, tokens: dict[str, list[int]], share: float = 1.0) -> None:
        self.tokens, self.share, self.calls = tokens, share, 0

    def map(self, element: dict[str, np.ndarray]) -> dict[str, Any]:
        self.calls += 1
        masked = np.isin(element["targets"], [token for some in self.tokens.values() for token in some])
        masked &= masked.mean(axis=-1, keepdims=True) <= self.share
        return {**element, "targets_segmentation": np.where(masked, 0, element["targets_segmentation"])}
