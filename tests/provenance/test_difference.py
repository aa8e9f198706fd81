"""`difference` finds where the batches of two pipelines differ. See also tests/pipeline/test_amendments.py."""

import grain
import numpy as np
import pytest

from grain_sft import Pipeline
from grain_sft.bench.config import report_speed
from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.provenance import difference


def test_steps_after_the_end_of_both_runs_do_not_differ(make):
    one, other = (make(audit=None, epochs=1, seed=seed) for seed in (1, 2))
    end = one.end_step
    assert difference(one, one, steps=range(end + 5)).compared == range(end)
    for steps in (range(end + 5), range(end, end + 5)):
        assert difference(one, one, steps=steps).first_step is None
    assert difference(one, other, steps=range(end, end + 5)).first_step is None
    assert difference(one, make(audit=None, epochs=2, seed=1), steps=range(end + 5)).first_step == end
    for steps in (range(0, 6, 2), range(-3, 6), 6):
        with pytest.raises(RowIndexError, match="expected consecutive steps from 0 on"):
            difference(one, other, steps=steps)


class TokenInColumn(grain.transforms.Map):
    """Add an array [rows], the token of each row in one column, and a number."""

    def __init__(self, column):
        self.column = column

    def map(self, element):
        return element | {"token": element["inputs"][:, self.column], "scale": 0.5}


def test_arrays_with_any_number_of_axes_are_compared(make):
    plain, steps = make(audit=None), range(3)
    pair = [Pipeline(plain.source, plain.sampler, [*plain.transforms, TokenInColumn(column)]) for column in range(2)]
    rows = np.concatenate([plain[step]["inputs"] for step in steps])
    found = difference(*pair, steps=steps, count=len(steps))
    assert found.differing_rows == np.count_nonzero(rows[:, 0] != rows[:, 1]) and found.total_rows == len(rows)


def test_batches_that_are_not_dicts_are_refused(make):
    plain = make(audit=None)
    transform = type("Tuples", (grain.transforms.Map,), {"map": lambda self, element: tuple(element.values())})()
    changed = Pipeline(plain.source, plain.sampler, [transform])
    for call in (lambda: difference(plain, changed, steps=range(1)), lambda: report_speed(changed, 0.01)):
        with pytest.raises(PipelineError, match="expected a dict of arrays"):
            call()
