"""`MaskEod`: a transform that takes the loss off targets at the ends of documents."""

import grain

from grain_sft.arguments import as_integer, check_type
from grain_sft.errors import TransformError
from grain_sft.source import Element
from grain_sft.transforms.element import require_keys


class MaskEod(grain.transforms.Map):
    """Transform that takes the loss off each token after an EOD (end of document) token, as Megatron's `eod_mask_loss` does.

    So the model does not learn to predict the first token of a document from the EOD before it. Put this transform before
    `ShiftTargets`.

    Args:
      eod_token_id: Token that ends a document.
      as_target: Whether the EOD tokens themselves take no loss, as with MaxText's `grain_file_type=mmap`. By default, the
        tokens after EOD tokens take no loss.
    """

    column_reach = (1, 0)  # a token's loss depends on the token before it

    def __init__(self, eod_token_id: int, *, as_target: bool = False) -> None:
        self.eod_token_id = as_integer("MaskEod: eod_token_id", eod_token_id, 0, TransformError)
        check_type("MaskEod: as_target", as_target, bool, "True or False")
        self.as_target = as_target

    def map(self, element: Element) -> Element:
        """Return `element` with the new `loss_mask`."""
        require_keys(self, element, ("tokens", "loss_mask"))
        ends = element["tokens"] == self.eod_token_id
        loss_mask = element["loss_mask"].copy()
        if self.as_target:
            loss_mask &= ~ends
        else:
            loss_mask[..., 1:] &= ~ends[..., :-1]
        return {**element, "loss_mask": loss_mask}

    def __repr__(self) -> str:
        return f"MaskEod(eod_token_id={self.eod_token_id}, as_target={self.as_target})"
