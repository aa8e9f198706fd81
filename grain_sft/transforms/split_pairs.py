"""`SplitPairs`: a transform for DPO and ORPO trainers, which train on preference pairs."""

import grain
import numpy as np
from absl import logging

from grain_sft.arguments import as_integer
from grain_sft.errors import TransformError
from grain_sft.source import Element
from grain_sft.transforms.element import INT32_MAX, as_int32, require_keys


class SplitPairs(grain.transforms.Map):
    """Transform that splits rows of `PairsLayout` into the int32 arrays of MaxText's and Tunix's DPO and ORPO trainers.

    A row has three segments: the prompt, the chosen response and the rejected response.

    `prompt_ids` [P] is padded on the left; `chosen_ids` and `rejected_ids` [R] are padded on the right. For rows of L tokens,
    R is (L - P) / 2: 512 for L = 1536 and P = 512. `prompt_mask`, `chosen_mask` and `rejected_mask` are 1 where the token is
    not `pad_token_id`, as in MaxText's `DPODataFormatting`. So a `pad_token_id` inside a text is masked, too. The transform
    logs one warning about such tokens.

    Args:
      prompt_length: Number of tokens of `prompt_ids`, P. It must equal the layout's `prompt_length`.
      pad_token_id: Padding token of the trainer's tokenizer.
    """

    shifts_targets = splits_rows = True
    no_loss_reason = (
        "the chosen response of each pair is equal to the rejected one within the tokens that the layout keeps. Give a larger "
        "sequence_length, or a smaller prompt_length."
    )

    def __init__(self, prompt_length: int, pad_token_id: int) -> None:
        self.prompt_length = as_integer("SplitPairs: prompt_length", prompt_length, 1, TransformError)
        self.pad_token_id = as_integer("SplitPairs: pad_token_id", pad_token_id, 0, TransformError, INT32_MAX)
        self._warned = False

    def map(self, element: Element) -> Element:
        """Return the six arrays for the rows of pairs in `element`.

        Raises:
          TransformError: The rows are not pairs with prompts of at most P tokens, a token of a response takes no loss, or a
            token does not fit in int32.
        """
        require_keys(self, element, ("tokens", "loss_mask", "segment_ids"))
        tokens, segments, prompt = as_int32(element["tokens"]), element["segment_ids"], self.prompt_length
        response, odd = divmod(tokens.shape[-1] - prompt, 2)
        sizes = {"prompt": prompt, "chosen": response, "rejected": response}
        # for each segment, its number of tokens in each row: [1], or [rows, 1]
        lengths = [np.count_nonzero(segments == number, axis=-1)[..., None] for number in (1, 2, 3)]
        fits = response > 0 and not odd and segments.max(initial=0) <= len(sizes)
        if not fits or any((length > size).any() for length, size in zip(lengths, sizes.values(), strict=True)):
            problem = f"rows of {tokens.shape[-1]} tokens are not pairs with prompts of at most {prompt} tokens"
            raise TransformError(f"{self!r}: {problem}. Use a layout of kind pairs that has this prompt_length.")
        without_loss = np.argwhere((segments > 1) & ~element["loss_mask"]).tolist()
        if without_loss:
            problem = f"the token at {without_loss[0]} takes no loss, but trainers of pairs train on whole responses"
            raise TransformError(f"{self!r}: {problem}. Remove the transform that masks it, or give use_loss_mask: false.")
        batch: Element = {}
        first = np.zeros_like(lengths[0])  # column at which the part begins in each row
        for (name, size), length in zip(sizes.items(), lengths, strict=True):
            # position of each output column in the part; below 0 in the padding on the left of a prompt
            position = np.arange(size) - (size - length if name == "prompt" else 0)
            inside = (position >= 0) & (position < length)
            ids = np.take_along_axis(tokens, np.where(inside, position + first, 0), axis=-1)
            ids = np.where(inside, ids, np.int32(self.pad_token_id))
            batch[f"{name}_ids"], batch[f"{name}_mask"] = ids, (ids != self.pad_token_id).astype(np.int32)
            first = first + length
            if not self._warned and (inside & (ids == self.pad_token_id)).any():
                self._warned = True
                logging.warning("%r: %s_ids: a text holds the padding token. It is masked, as in MaxText.", self, name)
        return batch

    def __repr__(self) -> str:
        return f"SplitPairs(prompt_length={self.prompt_length}, pad_token_id={self.pad_token_id})"
