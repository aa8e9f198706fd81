"""Stages read the rows that a naive walk through the stream of tokens reads.

OLMo-core's warm-ups begin a run with shorter rows or smaller batches. Stages with these lengths and sizes read its rows.
"""

import itertools
import random

import numpy as np
import pytest
from batches import error_of, golden_values, load, sections
from megatron_corpora import write_megatron

from grain_sft import Host
from grain_sft.provenance import trace


def numbered(folder, sizes):
    """Write shards of these sizes, and return the section `corpus`. Token k of all shards together is k."""
    shards = np.split(np.arange(sum(sizes), dtype="<u4"), np.cumsum(sizes)[:-1])
    paths = [str(folder / f"{number}.npy") for number in range(len(sizes))]
    for path, tokens in zip(paths, shards, strict=True):
        tokens.tofile(path)
    return {"path": paths, "dtype": "uint32", "eos_token_id": 2**32 - 1}


def config_of(corpus, length, layout="windows", **sampler):
    return sections(None, length, corpus=corpus, layout=layout, **sampler) | {"transforms": []}


def rows_by_hand(sizes, longest, shapes, order, run_on):
    """Walk through the stream of tokens in rows of length `longest`. Return the tokens of each step, and the gaps.

    `shapes` has (steps, row length, batch size) of each stage. Its gap is the number of tokens that it leaves out to begin
    at a whole row.
    """
    shards = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    rows = np.concatenate([shard[: len(shard) // longest * longest].reshape(-1, longest) for shard in shards])
    epochs = (rows[order(epoch, np.arange(len(rows)))].reshape(-1) for epoch in itertools.count())
    stream, at, gaps, steps = next(epochs), 0, [], []
    for count, length, batch in shapes:
        gaps.append(-at % length)
        at += gaps[-1]
        for _ in range(count):
            if not run_on and at % rows.size + batch * length > rows.size:  # the batch would cross the end of an epoch
                at += -at % rows.size
            while at + batch * length > len(stream):
                stream = np.append(stream, next(epochs))
            steps.append(stream[at : at + batch * length].reshape(batch, length))
            at += batch * length
    return steps, gaps


@pytest.mark.parametrize("seed", range(200))
def test_rows_and_gaps_of_stages_are_those_of_a_naive_walk(tmp_path, seed):
    drawn = random.Random(seed)
    longest = drawn.choice([8, 12, 16, 24])
    lengths = [length for length in range(2, longest + 1) if longest % length == 0]
    sizes = [drawn.randrange(0, 9) * longest + drawn.randrange(longest) for _ in range(3)] + [8 * longest]
    # If `even` is 2, every batch has an even number of rows, so two hosts can divide it.
    even, run_on, order = drawn.choice([1, 2]), drawn.random() < 0.5, drawn.choice(["shuffle", "olmo", "sequential"])
    draws, stages = range(drawn.randrange(1, 6)), []
    shapes = [(drawn.randrange(1, 12), drawn.choice(lengths), even * drawn.randrange(1, 7 // even)) for _ in draws]
    shapes.append((drawn.randrange(1, 6), longest, 2))
    for count, length, batch in shapes:
        tokens = (count - 1) * length * batch + drawn.randrange(1, length * batch + 1)
        stages.append({"steps": count} if drawn.random() < 0.7 else {"tokens": tokens})
        stages[-1] |= {"layout": {"sequence_length": length}, "sampler": {"global_batch_size": batch}}
    sampler = {"seed": seed, "order": order, "last_batch": "run_on" if run_on else "drop"}
    config = config_of(numbered(tmp_path, sizes), longest, **sampler)
    expected, gaps = rows_by_hand(sizes, longest, shapes, load(config).sampler.streams[0].rows_at, run_on)
    staged = load({**config, "stages": stages})
    assert [(each.end_step - each.first_step) for each in staged.stages] == [count for count, _, _ in shapes]
    assert len(staged) == len(expected)
    for step, rows in enumerate(expected):
        np.testing.assert_array_equal(staged[step]["tokens"], rows)
    assert list(staged.gaps) == gaps
    if not any(batch % 2 for _, _, batch in shapes):
        split = [staged.replace(host=Host(host, 2)) for host in range(2)]
        for (step, rows), host in itertools.product(enumerate(expected), range(2)):
            np.testing.assert_array_equal(split[host][step]["tokens"], rows[host::2])


def test_a_stage_in_order_maxtext_is_refused_if_the_blocks_of_hosts_would_have_other_tokens(tmp_path):
    """A block has 10 rows of 16 tokens, but 2 rows of 64. The second stage would repeat 128 tokens of the first."""
    stages = [{"steps": 4}, {"layout": {"sequence_length": 64}}]
    config = config_of(numbered(tmp_path, [640]), 16, order="maxtext") | {"stages": stages}
    assert "4 blocks of 2.5 chunks; this stage has batches of 4 blocks of 2.0 chunks" in error_of(config, Host(0, 4))


def test_a_stage_of_another_subset_begins_with_its_first_row_and_has_other_documents(tmp_path):
    prefix = write_megatron(tmp_path / "a", [[[*range(3, 12), 2]]] * 20)
    stages = [{"steps": 1, "corpus": {"subset": subset}} for subset in ("train", "valid")]
    run = load(config_of({"path": prefix, "split": "1,1"}, 20, "packed", global_batch_size=2) | {"stages": stages})
    documents = trace(run, range(1, 2)).document
    assert run.sampler.slots(range(1, 2)).index.tolist() == [0, 1] and min(documents) >= 10


GOLDEN = golden_values("olmo_stages.json")


@pytest.mark.parametrize("case", GOLDEN["chunks"], ids=lambda case: f"{case['L']}-of-{case['longest']}")
def test_short_rows_are_parts_of_longer_rows_as_in_olmo_core(tmp_path, case):
    layout = {"kind": "windows", "max_target_sequence_length": case["longest"]}
    corpus, sampler = numbered(tmp_path, case["files"]), {"seed": case["seed"], "global_batch_size": case["rows"]}
    pipeline = load(config_of(corpus, case["L"], layout, **sampler))
    expected = [first for epoch in case["epochs"] for first in epoch]
    assert [pipeline[step]["tokens"][:, 0].tolist() for step in range(len(expected))] == expected


@pytest.mark.parametrize("case", GOLDEN["runs"], ids=lambda case: f"{case['L']}-{len(case['steps'])}")
def test_warm_ups_of_row_length_and_batch_size_read_the_rows_of_olmo_core(tmp_path, case):
    shapes = [*((step["L"], len(step["first"])) for step in case["steps"]), (case["L"], 1)]
    config, stages = config_of(numbered(tmp_path, case["files"]), case["L"], seed=case["seed"]), []
    for (length, rows), steps in itertools.groupby(shapes):
        own = {"layout": {"sequence_length": length}, "sampler": {"global_batch_size": rows}}
        stages.append({"steps": len(list(steps)), **own})
    pipeline = load({**config, "stages": stages})
    for step, expected in enumerate(case["steps"]):
        assert pipeline[step]["tokens"].shape == (len(expected["first"]), expected["L"])
        assert pipeline[step]["tokens"][:, 0].tolist() == expected["first"]


def test_late_steps_are_read_without_the_steps_before_them(tmp_path):
    stages = [{"steps": 10**6, "sampler": {"global_batch_size": 2 + number % 3}} for number in range(20)]
    skips = [{"skip": {"from": 9000 * number, "steps": 3}} for number in range(1, 1001)]
    config = config_of(numbered(tmp_path, [999, 1500]), 16, order="shuffle", global_batch_size=2, last_batch="run_on")
    plain = load(config)
    stream, count = plain.sampler.streams[0].rows_at, len(plain.source)
    staged = load({**config, "stages": stages, "amendments": skips})
    for step in (10**7 - 1, 10**7, 19 * 10**6):
        # `data` is the step in the run without skips, where stage n begins at step 10^6 * n.
        data = step + 3 * min(1000, step // 9000)
        sizes = [2 + number % 3 for number in range(data // 10**6 + 1)]
        first = sum(10**6 * size for size in sizes[:-1]) + data % 10**6 * sizes[-1]
        expected = [int(stream(row // count, np.array([row % count]))[0]) for row in range(first, first + sizes[-1])]
        assert staged.sampler.rows(step).tolist() == expected
