"""Global arrays of `GlobalBatches` are the same on 1, 2 and 4 real processes, on any mesh and from any step.

They are the same, too, if only some of the processes load rows.
"""

import itertools
import queue

import grain
import jax
import numpy as np
import pytest
from batches import assert_same, load, sections
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_processes import BY_4, CASES, LOCAL, check, check_columns, digests, end_state, run
from prometheus_client import REGISTRY
from sft_files import documents, write_episodes
from vsl_corpora import EOS, write_corpus

from grain_sft import GrainSftError, Host, Pipeline, ShiftTargets
from grain_sft.integrations.jax_arrays import GlobalBatches, process_rows
from grain_sft.transforms import DropLastPosition, TrimToMultiple

LENGTH, BATCH, STEPS = 32, 8, 3
DEVICES = 4  # number of devices of all processes together


def config(folder, **sampler):
    windows = {"corpus": {"dtype": "uint32"}, "layout": "windows", "global_batch_size": BATCH, **sampler}
    return sections(folder, LENGTH, **windows) | {"transforms": ["ngram_filter", "shift_targets"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    for number in range(3):
        np.random.default_rng(number).integers(0, 1000, LENGTH * 20 + 3, np.uint32).tofile(folder / f"{number}.npy")
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Documents with loss masks."""
    return write_episodes(tmp_path_factory.mktemp("chats"), documents(200, longest=50), shards=3)


@pytest.fixture(scope="module")
def pipeline(folder):
    return load(config(folder))


def job_of(name, config, cases, steps, **options):
    return {"name": name, "config": config, "cases": cases, "steps": steps, "options": options}


def columns_jobs(folder, cases, layouts, shards):
    """Return jobs whose processes read columns, one for each layout and each number of shards of the load-balanced order."""
    return [
        job_of(f"{layout} {count}", long_config(folder, layout), cases, 1, load_balanced_shards=count, ahead=0)
        for layout, count in itertools.product(layouts, shards)
    ]


def long_config(folder, layout):
    """Return a config whose processes may read columns: it has no filter, which would need whole rows."""
    return sections(folder, LENGTH, layout=layout, global_batch_size=BATCH)


def several_lengths(folder):
    """Return a config whose batches have rows of 8, 16 or 32 tokens."""
    corpus = {"dtype": "uint16", "eos_token_id": EOS}
    layout = {"kind": "olmo_vsl", "min_sequence_length": 8}
    config = sections(write_corpus("three files", folder)[0], 32, corpus=corpus, layout=layout)
    return config | {"sampler": {"curriculum": "grow_p2", "num_cycles": 1, "seed": 1, "global_batch_size": 4}}


def test_two_processes_have_the_global_arrays_of_one_on_every_mesh(folder, chats, pipeline, tmp_path):
    """Two processes resume at step 2, from the state of one process that took two steps."""
    one = GlobalBatches(pipeline, SingleDeviceSharding(jax.devices()[0]))
    assert [next(one) and one.next_step for _ in range(2)] == [1, 2]
    job = job_of("", config(folder), [*CASES, LOCAL], STEPS) | {"state": one.get_state()}
    divided = columns_jobs(chats, ["columns"], layouts=["packed"], shards=[1])
    divided += columns_jobs(chats, ["data x sequence over hosts"], layouts=["packed"], shards=[4])
    several = job_of("lengths", several_lengths(tmp_path), ["data", "data x sequence over hosts"], 6)
    stages = [{"steps": 2, "layout": {"sequence_length": length}} for length in (LENGTH, 2 * LENGTH)]
    stages.append({"transforms": ["ngram_filter", "shift_targets"]})
    staged = job_of("stages", long_config(chats, "packed") | {"stages": stages}, ["columns"], 6)
    every = run([job, *divided, several, staged], 2, DEVICES // 2)
    check_columns(every, divided)
    for each in (several, staged):
        check(every, digests(load(each["config"]), range(6)), each["cases"], each["name"])
    columns = [[line["columns"] for line in lines if line["job"] == "stages" and "step" in line] for lines in every]
    whole = [[None]] * 2  # None: the last stage has a filter, which needs whole rows
    assert columns[0] == [[[0, LENGTH // 2]]] * 2 + [[[0, LENGTH]]] * 2 + whole
    assert columns[1] == [[[LENGTH // 2, LENGTH]]] * 2 + [[[LENGTH, 2 * LENGTH]]] * 2 + whole
    check(every, digests(pipeline, range(2, 2 + STEPS)), CASES)
    check(every, digests(pipeline, range(STEPS), order=[0, 2, 4, 6, 1, 3, 5, 7]), [LOCAL])
    assert end_state(every)["next_step"] == 2 + STEPS
    for case in CASES:
        reads = [next(line["reads"] for line in lines if (line["job"], line["case"]) == ("", case)) for lines in every]
        whole = case == "columns" or "over hosts" in case
        assert reads == ([list(range(8))] * 2 if whole else [[0, 1, 2, 3], [4, 5, 6, 7]]), case


@pytest.mark.processes
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_run_continues_on_another_number_of_processes(folder, pipeline, processes):
    state = None
    for number, count in enumerate((processes, *(other for other in (1, 2, 4) if other != processes))):
        job = job_of("", config(folder), CASES, STEPS) | ({"state": state} if state else {})
        printed = run([job], count, DEVICES // count)
        check(printed, digests(pipeline, range(number * STEPS, (number + 1) * STEPS)), CASES)
        state = end_state(printed)
        assert state["next_step"] == (number + 1) * STEPS


@pytest.mark.processes
@pytest.mark.parametrize(("processes", "loaders"), [(2, [0]), (2, [1]), (4, [1, 2]), (4, [3])])
@pytest.mark.parametrize("num_rows", [BATCH, 2 * BATCH])
def test_processes_that_load_no_rows_get_them_from_the_loaders(folder, pipeline, processes, loaders, num_rows):
    job = job_of("", config(folder), CASES, STEPS, loaders=loaders, num_rows=num_rows)
    printed = run([job], processes, DEVICES // processes)
    check(printed, digests(pipeline, range(STEPS), num_rows), CASES)
    read = [set(lines[0]["reads"]) for lines in printed]
    assert all(bool(rows) == (process in loaders) for process, rows in enumerate(read))
    assert sorted(row for rows in read for row in rows) == list(range(BATCH))


def sharding():
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_batches_are_the_same_for_any_number_of_batches_made_ahead(pipeline, ahead):
    batches = GlobalBatches(pipeline, sharding(), start_step=4, ahead=ahead)
    taken = [next(batches) for _ in range(5)]  # a batch made ahead must not overwrite a kept one
    for step, batch in enumerate(taken, 4):
        assert_same(batch, pipeline[step])


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_next_batches_are_begun_before_they_are_requested(pipeline, ahead):
    """After two batches, at least half of `ahead` further batches have begun, and never more than `ahead`."""
    prepared = queue.SimpleQueue()
    options = {"threads": 1, "prepare": lambda step, _, batch: prepared.put(step) or batch}
    batches = GlobalBatches(pipeline, sharding(), ahead=ahead, **options)
    next(batches)
    next(batches)
    found = [prepared.get(timeout=300) for _ in range(2 + (ahead + 1) // 2)]
    batches.close()
    while not prepared.empty():
        found.append(prepared.get())
    assert found == list(range(len(found))) and len(found) <= 2 + ahead


def test_the_batches_end_with_the_last_step_and_begin_again_when_reset(folder):
    whole = load(config(folder, epochs=1, last_batch="fill"))
    batches, made = GlobalBatches(whole, sharding()), REGISTRY.get_sample_value("grain_sft_make_seconds_count")
    assert len(whole) == 8  # the last batch has 4 of the 60 rows, and 4 fill rows
    for _ in range(2):
        steps = list(batches)
        assert len(steps) == 8
        assert_same(steps[7], whole[7])
        assert not np.asarray(steps[7]["targets_segmentation"])[4:].any()
        batches.reset()
    assert REGISTRY.get_sample_value("grain_sft_make_seconds_count") == made + 16


@pytest.mark.parametrize("loaders", [None, [0]])
def test_rows_beyond_the_batch_are_zero_and_arrays_keep_their_dtypes(pipeline, loaders):
    options = {"loaders": loaders, "prepare": lambda step, block, batch: {**batch, "bool": batch["inputs"] > 0}}
    batch = next(GlobalBatches(pipeline, sharding(), num_rows=12, **options))
    assert_same({key: array[:8] for key, array in batch.items()}, {**pipeline[0], "bool": pipeline[0]["inputs"] > 0})
    assert all(array.shape == (12, LENGTH) and not np.asarray(array)[8:].any() for array in batch.values())


def test_the_shape_of_the_batches_may_change_at_a_step(folder):
    lengthened = {"steps": 2, "layout": {"sequence_length": 2 * LENGTH}}
    staged = load({**config(folder), "stages": [{"steps": 2}, lengthened, {"sampler": {"global_batch_size": 16}}]})
    scheduled = load(config(folder, schedule=[{"step": 3, "global_batch_size": 16}]))
    wide = (8, 2 * LENGTH)
    for whole, shapes in ((staged, [wide, wide, (16, LENGTH)]), (scheduled, [(8, LENGTH), (16, LENGTH), (16, LENGTH)])):
        batches = GlobalBatches(whole, sharding(), start_step=2)
        for step, shape in enumerate(shapes, 2):
            batch = next(batches)
            assert batch["inputs"].shape == shape
            assert_same(batch, whole[step])


def test_a_step_that_failed_is_tried_again(tmp_path):
    for name in ("a.npy", "b.npy"):
        np.arange(LENGTH * 40, dtype=np.uint32).tofile(tmp_path / name)
    expected, whole = (load(config(tmp_path, shuffle=False)) for _ in range(2))
    batches = GlobalBatches(whole, sharding())
    (tmp_path / "b.npy").rename(tmp_path / "away")
    taken = [next(batches) for _ in range(5)]
    for _ in range(2):
        with pytest.raises(GrainSftError, match=r"b\.npy"):
            next(batches)
    (tmp_path / "away").rename(tmp_path / "b.npy")
    for step, batch in enumerate([*taken, next(batches)]):
        assert_same(batch, expected[step])


def test_a_process_whose_rows_are_a_block_of_the_array_has_a_host_and_one_without_rows_has_none(pipeline):
    mine = process_rows(sharding(), (BATCH, LENGTH))
    assert mine.rows.tolist() == list(range(BATCH)) and mine.host == (0, 1)
    assert process_rows(sharding(), (BATCH, LENGTH), process=1).host is None


def test_wrong_options_pipelines_and_batches_are_refused(folder, pipeline, monkeypatch):
    for options, message in (
        ({"num_rows": 4}, "global batch alone has 8 rows"),
        ({"ahead": -1}, "ahead"),
        ({"threads": 0}, "threads"),
        ({"start_step": -1}, "step"),
        ({"loaders": [1]}, "expected a process that has a device of"),
        ({"load_balanced_shards": 3}, "expected an even number"),
        ({"load_balanced_shards": 6}, "can't be cut into 12 equal chunks"),
    ):
        with pytest.raises(GrainSftError, match=message):
            GlobalBatches(pipeline, sharding(), **options)
    with pytest.raises(GrainSftError, match=r"Load it with host=Host\(0, 1\)"):
        GlobalBatches(load(config(folder), host=Host(1, 2)), sharding())
    with pytest.raises(GrainSftError, match=r"GlobalBatches: sharding is Mesh.*expected NamedSharding"):
        GlobalBatches(pipeline, sharding().mesh)
    with pytest.raises(GrainSftError, match=r"length of its own: .*TrimToMultiple\(8\)\)\. Remove"):
        GlobalBatches(Pipeline(pipeline.source, pipeline.sampler, [ShiftTargets(), TrimToMultiple(8)]), sharding())
    monkeypatch.setattr(DropLastPosition, "cuts_columns", False)  # like a user's transform that does not state it
    cut = Pipeline(pipeline.source, pipeline.sampler, [ShiftTargets(), DropLastPosition()])
    with pytest.raises(GrainSftError, match=r"\[8, 31\].*\[8, 32\].*Remove"):
        next(GlobalBatches(cut, sharding()))
    for part in (np.s_[:2], np.s_[:, :16], np.s_[:, 0]):
        changed = {key: array[part] for key, array in pipeline[0].items()}
        with pytest.raises(GrainSftError, match=r"has shape .*expected \[8, 32\].*correct `prepare`"):
            next(GlobalBatches(pipeline, sharding(), prepare=lambda *_, changed=changed: changed))
    for wrong in (None, {"inputs": [[1]]}):
        with pytest.raises(GrainSftError, match=r"of step 0 is .*; expected a"):
            next(GlobalBatches(pipeline, sharding(), prepare=lambda *_, wrong=wrong: wrong))


class RowSums(grain.transforms.Map):
    def map(self, element):
        return {**element, "sum": element["inputs"].sum(axis=-1)}  # one value for each row


def test_a_transform_may_cut_the_last_column_and_prepare_must_drop_arrays_without_columns(folder, pipeline):
    cut = load({**config(folder), "transforms": ["shift_targets", "drop_last_position", f"{__name__}:RowSums"]})
    arrays = GlobalBatches(cut, sharding(), prepare=lambda step, block, batch: {key: batch[key] for key in pipeline[0]})
    batch, whole = next(arrays), next(GlobalBatches(pipeline, sharding()))
    assert_same(batch, {key: array[:, :-1] for key, array in whole.items()})
    with pytest.raises(GrainSftError, match=r"'sum' of step 0 has shape \[8\]; expected \[8, 31\]"):
        next(GlobalBatches(cut, sharding()))


@pytest.mark.processes
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (1, 8), (4, 4), (4, 8)])
def test_a_mesh_that_divides_the_sequence_has_the_same_global_arrays(chats, processes, devices):
    cases = [*CASES, *(BY_4 if devices == 8 else ())]
    jobs = columns_jobs(chats, cases, layouts=["windows", "packed", "padded"], shards=[1, 2, 4])
    check_columns(run(jobs, processes, devices // processes), jobs)


@pytest.mark.processes
@pytest.mark.parametrize("length", [1 << 17, 1 << 20])
def test_a_process_reads_few_bytes_besides_those_of_its_devices(tmp_path, write_tokens, length):
    tokens = np.random.default_rng(0).integers(1, 60_000, 9 * length, np.uint16)
    tokens[length // 3 - 1 :: length // 3] = 7
    path = write_tokens("tokens.npy", tokens, "uint16")
    corpus, cases = {"dtype": "uint16", "eos_token_id": 7}, ["data x sequence over hosts", "columns"]
    jobs = []
    for layout in ("windows", "packed", "padded"):
        config = sections(path, length, corpus=corpus, layout=layout)
        jobs.append(job_of(layout, config, cases, 2, ahead=0, load_balanced_shards=4) | {"digests": False})
    share = 2 * 4 * length * tokens.itemsize // 4  # 2 steps of 4 rows, divided by 4 processes
    for lines in run(jobs, 4, 1):
        read = {(line["job"], line["case"]): line["read_bytes"] for line in lines if "read_bytes" in line}
        # The check of the first batches ended, even in a process that read only padding.
        assert not any(line.get("unchecked") for line in lines)
        assert len(read) == len(jobs) * len(cases)
        for (layout, _), count in read.items():  # layouts other than windows have padding, which is not read
            assert count <= 1.1 * share and (count >= share or layout != "windows"), read
