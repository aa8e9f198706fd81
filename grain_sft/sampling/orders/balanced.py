"""Balanced order: a step reads rows of similar cost, so that no device waits for a device with a more expensive row."""

import functools

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.layout import expand_counts
from grain_sft.sampling.orders.order import CacheDir, Costs, Order, RowsAt, cached_by_epoch
from grain_sft.types import Ints


def balanced(num_rows: int, *, seed: int, cache_dir: CacheDir, costs: Costs) -> RowsAt:
    """Return an order that sorts an epoch's rows by cost, cuts them into steps, and shuffles the steps.

    The cost of a row is the cost of its attention: the sum of the squares of its segment lengths.

    Advantages: the devices of a step finish together. Nothing is padded, and the rows of a step do not depend on the hosts.
    Disadvantages: a step has either long documents or short documents. An epoch takes 8 bytes of memory per row, and 0.5 s of
    work per million rows.

    Rows of equal cost are in random order. If the steps of an epoch do not read all rows, the unread rows are random.
    """

    @functools.cache
    def cost_of() -> Ints:
        row_costs = np.asarray(costs.rows())
        if row_costs.shape != (num_rows,) or row_costs.dtype.kind not in "iu":
            expected = f"expected an integer, the cost, for each of {num_rows} rows, such as layout.row_costs"
            raise SamplerError(f"costs: {row_costs.dtype} of shape {list(row_costs.shape)}; {expected}.")
        return row_costs

    def rows_of_epoch(epoch: int) -> Ints:
        """Return the row at each index of an epoch, int64 [num_rows]."""
        random = np.random.Generator(np.random.PCG64([seed, epoch]))
        cuts = costs.cuts(epoch)
        rows: Ints = random.permutation(num_rows)
        read = rows[: cuts[-1]]
        by_cost = read[np.argsort(cost_of()[read], kind="stable")]
        steps = random.permutation(len(cuts) - 1)  # step `steps[0]` gets the cheapest rows, step `steps[1]` the next
        # row i of `by_cost` goes to step `steps[rank[i]]`; row i of `shuffled_in_steps` goes to slot `slot[i]` of that step
        rank, slot = expand_counts(np.diff(cuts)[steps])
        shuffled_in_steps = by_cost[np.lexsort((random.random(len(by_cost)), rank))]
        rows[cuts[steps][rank] + slot] = shuffled_in_steps
        return rows

    return cached_by_epoch(rows_of_epoch)


BALANCED = Order(balanced, by_cost=True)
