"""Checkpoints of Orbax and Grain have a step and a receipt, and a run on other data refuses them."""

import functools
import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from batches import assert_same, load, sections
from grain.checkpoint import CheckpointRestore, CheckpointSave
from jax.sharding import SingleDeviceSharding

from grain_sft import GrainSftError, Host
from grain_sft.integrations import checkpoint
from grain_sft.integrations.jax_arrays import GlobalBatches

LENGTH = 16


def config(folder, **sampler):
    return sections(folder, LENGTH, corpus={"dtype": "uint32", "eos_token_id": 0}, layout="windows", **sampler)


def write(folder, seed):
    np.random.default_rng(seed).integers(0, 1000, LENGTH * 40, np.uint32).tofile(folder / "a.npy")
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokens").mkdir()
    return write(tmp_path / "tokens", 0)


def pipeline(folder, **sampler):
    return load(config(folder, **sampler))


def iterator(kind, pipeline, **options):
    if kind == "arrays":
        return GlobalBatches(pipeline, SingleDeviceSharding(jax.devices()[0]), **options)
    return checkpoint.CheckedIterator(pipeline, **options)


KINDS = pytest.mark.parametrize("kind", ["arrays", "host"])


@pytest.fixture
def manager(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        yield manager


def save(manager, step, **items):
    assert manager.save(step, args=ocp.args.Composite(**items))
    manager.wait_until_finished()


@KINDS
def test_orbax_saves_and_restores_the_step_together_with_the_weights(folder, manager, kind):
    data = pipeline(folder)
    weights = ocp.args.StandardSave({"w": jax.numpy.arange(6.0)})
    batches = iterator(kind, data)
    assert checkpoint.restore(manager, batches) is None  # no checkpoint yet: the run begins at step 0
    for step in range(5):
        assert_same(next(batches), data[step])
        if step in (2, 4):
            save(manager, step, weights=weights, data=checkpoint.save_args(batches))
    for step, expected in ((None, 5), (2, 3)):
        again = iterator(kind, pipeline(folder))
        assert checkpoint.restore(manager, again, step) == expected
        assert_same(next(again), data[expected])


CHANGES = {
    "seed": ("sampler", lambda folder: pipeline(folder, seed=2)),
    "batch": ("sampler", lambda folder: pipeline(folder, global_batch_size=8)),
    "transforms": ("transforms", lambda folder: load({**config(folder), "transforms": []})),
    "tokens": ("corpus", lambda folder: pipeline(write(folder, 1))),
}


@pytest.mark.parametrize(("kind", "change"), [*(("host", change) for change in CHANGES), ("arrays", "seed")])
def test_other_data_is_refused_with_the_name_of_the_change_unless_it_is_allowed(folder, manager, kind, change):
    part, make = CHANGES[change]
    batches = iterator(kind, pipeline(folder))
    next(batches)
    save(manager, 0, data=checkpoint.save_args(batches))
    other = make(folder)
    refused = iterator(kind, other, start_step=2)
    with pytest.raises(GrainSftError, match=f"\n  {part} differs: here .* there ") as error:
        checkpoint.restore(manager, refused)
    assert str(error.value).count(" differs: ") == 1
    assert refused.next_step == 2  # the iterator stays where it was
    allowed = iterator(kind, other, allow_other_data=True)
    assert checkpoint.restore(manager, allowed) == 1
    assert_same(next(allowed), other[1])


@pytest.mark.parametrize("items", [{"weights": ocp.args.JsonSave({})}, {"data": ocp.args.StandardSave({"a": np.ones(1)})}])
def test_a_checkpoint_that_is_missing_or_lacks_the_item_is_named(folder, manager, items):
    save(manager, 0, **items)
    for step, message in ((None, "checkpoint 0 whose item 'data' is missing, damaged"), (7, r"no checkpoint 7; .* are \[0\]")):
        with pytest.raises(GrainSftError, match=message):
            checkpoint.restore(manager, iterator("host", pipeline(folder)), step)


@KINDS
def test_grains_own_handlers_save_and_restore_the_step(folder, manager, kind):
    data = pipeline(folder)
    batches = iterator(kind, data, start_step=6)
    next(batches)
    save(manager, 6, data=CheckpointSave(batches))
    again = iterator(kind, pipeline(folder))
    manager.restore(6, args=ocp.args.Composite(data=CheckpointRestore(again)))
    assert_same(next(again), data[7])
    other = iterator(kind, pipeline(folder, seed=9))
    with pytest.raises(GrainSftError, match="sampler differs"):
        manager.restore(6, args=ocp.args.Composite(data=CheckpointRestore(other)))


def test_a_state_is_json_and_fits_any_number_of_hosts(folder):
    state = json.loads(json.dumps(checkpoint.data_state(load(config(folder), host=Host(1, 4)), 3)))
    assert state == checkpoint.data_state(load(config(folder), host=Host(0, 2)), 3)
    assert checkpoint.resume_step(state, pipeline(folder)) == 3


def test_other_data_in_a_stage_that_a_skip_moves_is_refused(folder):
    def run(*stages):
        return load({**config(folder), "stages": list(stages), "amendments": [{"skip": {"from": 1, "steps": 2}}]})

    one, other = (run({"steps": 5}, {"sampler": {"seed": seed}}) for seed in (1, 2))
    assert one.stages[1].first_step == 3 and checkpoint.resume_step(checkpoint.data_state(one, 3), other) == 3
    for resumed in (other, run()):
        with pytest.raises(GrainSftError, match="stage 2: sampler differs"):
            checkpoint.resume_step(checkpoint.data_state(one, 4), resumed)


def test_an_invalid_state_or_step_is_refused(folder):
    larger = config(folder, schedule=[{"step": 5, "global_batch_size": 8}])
    finite, ramped = pipeline(folder, epochs=1), load(larger, host=Host(0, 8))
    for state in (None, {}, {"next_step": "3", "parts": {}}, {"next_step": True, "parts": {}}, {"parts": {}}):
        with pytest.raises(GrainSftError, match="the checkpoint: not a data state"):
            checkpoint.resume_step(state, finite)
    for run, step, fault in ((finite, -1, "0 to 10"), (finite, 11, "0 to 10"), (ramped, 3, "step 3 on.* a multiple of 8")):
        with pytest.raises(GrainSftError, match=fault):
            checkpoint.resume_step({**checkpoint.data_state(run, 0), "next_step": step}, run)


def test_a_record_of_a_run_refuses_other_data_unless_it_is_allowed(folder, tmp_path):
    """A record is for trainers whose checkpoints have no data state."""
    one, two = pipeline(folder), pipeline(folder, seed=2)
    record = functools.partial(checkpoint.record_run, str(tmp_path / "data.json"))

    def recorded(key="next_step"):
        return [run[key] for run in checkpoint.read_record(str(tmp_path / "data.json"))]

    with pytest.raises(GrainSftError, match="expected 0 to"):
        record(one, one.end_step + 1)
    record(one, 0, write=False)
    assert recorded() == []
    record(one, 0)
    record(one, 5)
    for writes in (True, False):
        message = r"data.json is of .*next step is 5.*\n  sampler differs: .*seed=2.*seed=1"
        with pytest.raises(GrainSftError, match=message):
            record(two, 5, write=writes)
    assert recorded() == [0]
    record(two, 5, allow_other_data=True)
    record(two, 8)
    assert recorded() == [0, 5]
    with pytest.raises(GrainSftError, match="sampler differs"):
        record(one, 8)
    record(one, 4)  # steps 0 to 3 had this data; the entry of step 5 is dropped
    assert recorded() == [0]
    record(one, 8)
    record(two, 0)  # a run that begins again at step 0 replaces the record
    assert recorded("receipt") == [two.receipt.code]


def test_a_file_that_is_not_a_record_is_refused(folder, tmp_path):
    path = tmp_path / "data.json"
    for text in ("", "[]", '{"runs": [1]}', '{"runs": 3}'):
        path.write_text(text)
        with pytest.raises(GrainSftError, match="not a record"):
            checkpoint.record_run(str(path), pipeline(folder), 0)
