"""MaxText's trainer on grain_sft's batches, without a patched file. Written for maxtext 0.2.5; see docs/maxtext.md.

    python -m grain_sft.integrations.maxtext BASE.yml key=value … grain_sft_config=PATH [grain_sft_eval_config=PATH]

This is MaxText's own command with other data. `make_train_iterator` and `make_eval_iterator` replace MaxText's factories for
`dataset_type=olmo_grain`.
"""

from grain_sft.integrations.maxtext.iterators import (
    MaxTextBatches,
    load_evaluation,
    make_eval_iterator,
    make_train_iterator,
)
from grain_sft.integrations.maxtext.launcher import main, train
from grain_sft.integrations.maxtext.options import Options, split

__all__ = [
    "MaxTextBatches", "Options", "load_evaluation", "main", "make_eval_iterator", "make_train_iterator", "split",
    "train",
]  # fmt: skip
