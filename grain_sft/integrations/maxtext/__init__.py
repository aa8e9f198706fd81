"""Training with MaxText on batches of grain_sft. No file of MaxText changes. Written for maxtext 0.2.5; see docs/maxtext.md.

    python -m grain_sft.integrations.maxtext BASE.yml key=value … grain_sft_config=PATH [grain_sft_eval_config=PATH]

The command runs MaxText's trainer with MaxText's arguments. During the run, functions of this package replace the functions
of MaxText that make the iterators for `dataset_type=olmo_grain`.
"""

from grain_sft.integrations.maxtext.iterators import MaxTextBatches, make_eval_iterator, make_train_iterator
from grain_sft.integrations.maxtext.launcher import main
from grain_sft.integrations.maxtext.options import Options

__all__ = ["MaxTextBatches", "Options", "main", "make_eval_iterator", "make_train_iterator"]
