"""`MegatronGptLayout` has the rows of the installed megatron-core, which needs torch: `pytest -m parity`."""

import numpy as np
import pytest
from megatron_corpora import EOD, write_prefix

from grain_sft import NpyDataSource, open_corpus
from grain_sft.layout import MegatronGptLayout

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("own_cache")]


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_random_blends_equal_those_of_megatron_core(tmp_path, seed):
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from make_megatron_gpt_golden import dataset_of

    random = np.random.default_rng(seed)
    names = [f"p{number}" for number in range(random.integers(1, 5))]
    for name in names:
        options = {"sequences": int(random.integers(1, 4)), "longest": int(random.integers(3, 60))}
        write_prefix(tmp_path, name, int(random.integers(20, 90)), int(random.integers(99)), **options)
    weighted = random.random() < 0.7
    kinds = [random.random(len(names)) + 0.01, random.integers(1, 9, len(names)).astype(float)]
    weights = random.choice(kinds).tolist()
    blend = [each for pair in zip(weights, names, strict=True) for each in pair] if weighted else names
    options = {"seed": int(random.integers(2**31)), "sequence_length": int(random.integers(4, 40))}
    options["num_samples"] = int(random.integers(1, 500)) if weighted or random.random() < 0.7 else None
    options["add_extra_token_to_sequence"] = bool(random.random() < 0.8)
    split, subset = str(random.choice(["1,0,0", "7,2,1"])), "train"
    expected = dataset_of(tmp_path, {"blend": blend, "split": split, "subset": subset, **options})
    paths = [str(tmp_path / each) if isinstance(each, str) else str(each) for each in blend]
    corpus = open_corpus(paths, format="megatron", eos_token_id=EOD, split=split, subset=subset)
    found = MegatronGptLayout(corpus, **options)
    assert len(found) == len(expected)
    rows = np.unique(random.integers(0, len(found), 60))
    tokens = NpyDataSource(found).read(rows)["tokens"][:, : options["sequence_length"]]
    assert tokens.tolist() == [expected[row]["tokens"].tolist() for row in rows.tolist()]
