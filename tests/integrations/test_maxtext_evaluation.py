"""Evaluations of configs whose stages alone have a corpus or a sampler, without MaxText."""

import numpy as np
import pytest
from batches import sections, write_config

from grain_sft.integrations import maxtext


@pytest.mark.parametrize("name", ["corpus", "sampler"])
def test_a_section_of_the_stages_alone_is_left_as_it_is(tmp_path, name):
    np.arange(64, dtype=np.uint32).tofile(tmp_path / "a.npy")
    config = sections(tmp_path / "a.npy", 8, corpus={"dtype": "uint32"}, layout="windows", order="shuffle")
    section = config.pop(name)
    stages = [{name: section, "steps": steps} for steps in (1, 2)]
    path = write_config(tmp_path / "config.json", {**config, "stages": stages})
    assert len(maxtext.load_evaluation(str(path))) == 3
