"""Balanced order: each step is made of rows of similar cost, so that no device waits for another one's row."""

import functools

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.layout import expand_counts
from grain_sft.sampling.orders.order import CacheDir, Costs, Ints, Order, RowsAt, kept_by_epoch


def balanced(num_rows: int, *, seed: int, cache_dir: CacheDir, costs: Costs) -> RowsAt:
    """Return an order that sorts an epoch's rows by cost, cuts them into steps, and shuffles the steps.

    Advantages: by the cost of attention, which is the sum of the squares of a row's segment lengths, the devices of a step
    finish together. Nothing is padded, and the rows of a step do not depend on the hosts.
    Disadvantages: a step has long documents or short ones, where random steps have both, unless the packing gives most rows
    equal costs (algorithm "balanced"). An epoch takes 8 bytes a row in memory, and 0.3 s per million rows.

    The rows that no step reads, at the end of an epoch, are drawn from all rows. Rows of equal cost are in random order.
    """

    @functools.cache
    def cost_of() -> Ints:
        found = np.asarray(costs.rows())
        if found.shape != (num_rows,):
            expected = f"expected the cost of each of {num_rows} rows, such as layout.row_costs"
            raise SamplerError(f"costs: an array of shape {list(found.shape)}; {expected}.")
        return found

    def rows_of(epoch: int) -> Ints:
        random, cuts = np.random.Generator(np.random.PCG64([seed, epoch])), costs.cuts(epoch)
        rows: Ints = random.permutation(num_rows)
        read = rows[: cuts[-1]]
        read = read[np.argsort(cost_of()[read], kind="stable")]
        steps = random.permutation(len(cuts) - 1)
        step, number = expand_counts(np.diff(cuts)[steps])
        rows[cuts[steps][step] + number] = read[np.lexsort((random.random(len(read)), step))]
        return rows

    return kept_by_epoch(rows_of)


BALANCED = Order(balanced, by_cost=True)
