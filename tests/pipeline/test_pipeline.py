"""Every way to read a step gives the same batch, with any number of hosts, threads and worker processes."""

import itertools
import json

import grain
import numpy as np
import pytest
from batches import Plain, assert_one_run, assert_same
from etils import epath

from grain_sft import Host, IndexSampler, NgramFilter, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus
from grain_sft.errors import GrainSftError, RowIndexError

LENGTH = 16
ROWS = 60
BATCH = 24
STEPS = ROWS // BATCH  # steps of an epoch, which leave out 12 of the 60 rows
TRANSFORMS = (NgramFilter(max_count=5), ShiftTargets())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """60 rows in 3 files. The first token of a row is 100 times the row's number. Row 7 fails the filter."""
    folder = tmp_path_factory.mktemp("tokens")
    row = 0
    for number, rows in enumerate((25, 30, 5)):
        tokens = np.concatenate([np.arange(LENGTH) + 100 * (row + i) for i in range(rows)] + [np.arange(5)])
        if number == 0:
            tokens[7 * LENGTH : 8 * LENGTH] = 700
        tokens.astype(np.uint32).tofile(folder / f"{number}.npy")
        row += rows
    return NpyDataSource(WindowLayout(open_corpus(folder), LENGTH))


def pipeline(source, host=Host(0, 1), order="shuffle", transforms=TRANSFORMS, global_batch_size=BATCH, **options):
    sampler = IndexSampler(len(source), global_batch_size=global_batch_size, seed=3, order=order, host=host, **options)
    return Pipeline(source, sampler, transforms)


def rows_of(batch):
    return (batch["inputs"][:, 0] // 100).tolist()


def assert_same_stream(batches, expected):
    for one, other in zip(batches, expected, strict=True):
        assert_same(one, other)


def test_a_batch_holds_the_rows_that_the_sampler_names(source):
    mine = pipeline(source)
    for step in (0, 1, 2, 77):
        batch, rows = mine[step], mine.sampler.rows(step)
        names = itertools.product(("inputs", "targets"), ("", "_position", "_segmentation"))
        assert set(batch) == set(map("".join, names))
        assert all(array.shape == (BATCH, LENGTH) and array.dtype == np.int32 for array in batch.values())
        tokens = np.stack([source[int(row)]["tokens"] for row in rows])
        np.testing.assert_array_equal(batch["inputs"], tokens)
        np.testing.assert_array_equal(batch["targets"][:, :-1], tokens[:, 1:])
        expected = np.ones((BATCH, LENGTH), np.int32)
        expected[:, -1] = 0
        expected[rows == 7] = 0
        np.testing.assert_array_equal(batch["targets_segmentation"], expected)


WAYS_TO_READ = [
    *((order, hosts, None) for order in ("shuffle", "olmo", "maxtext", "sequential") for hosts in (1, 2, 3, 4, 8)),
    *(("shuffle", hosts, 0) for hosts in (2, 4)),
    *(pytest.param("shuffle", hosts, 2, marks=pytest.mark.heavy) for hosts in (1, 2)),
]


@pytest.mark.parametrize(("order", "hosts", "workers"), WAYS_TO_READ)
def test_all_hosts_together_read_no_row_more_than_once_an_epoch(source, order, hosts, workers):
    """MaxText's olmo_grain would fail here: its sampler and its loader both divide the rows between the hosts."""
    read, batch_size = [], {3: 30, 8: 8}.get(hosts, 20)  # sizes that the hosts divide
    for index in range(hosts):
        mine = pipeline(source, Host(index, hosts), order, global_batch_size=batch_size)
        batches = mine.iter() if workers is None else mine.data_loader(worker_count=workers)
        for batch in itertools.islice(batches, ROWS // batch_size):
            read += rows_of(batch)
    assert len(read) == len(set(read)) == ROWS // batch_size * batch_size


@pytest.mark.parametrize("slots", [[0, 1, 2], [23, 4], []], ids=["first", "scattered", "none"])
def test_rows_of_some_slots_are_those_of_the_whole_batch(source, slots):
    whole = pipeline(source)
    part = whole.read(5, np.array(slots, np.int64))
    assert_same(part, {key: array[slots] for key, array in whole[5].items()})
    assert part["inputs"].shape == (len(slots), LENGTH)


@pytest.mark.parametrize("slot", [-1, 24])
def test_a_slot_that_the_batch_does_not_have_is_refused(source, slot):
    with pytest.raises(RowIndexError, match=f"slot {slot} of step 5: expected 0 to 23"):
        pipeline(source).read(5, np.array([2, slot]))


@pytest.mark.parametrize("host", [Host(0, 1), Host(2, 3), Host(7, 8)], ids=str)
@pytest.mark.parametrize("order", ["shuffle", "olmo", "maxtext"])
def test_a_resumed_run_has_the_batches_of_an_uninterrupted_one(source, order, host):
    mine = pipeline(source, host, order)
    assert_same_stream(itertools.islice(mine.iter(), 9), [mine[step] for step in range(9)])
    for start in (1, STEPS, 10_000_000):
        assert_one_run(lambda _: mine, range(start, start + 2), hosts=())


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.heavy)])
def test_worker_processes_change_no_value(source, workers):
    mine = pipeline(source, Host(2, 3), "olmo")
    assert_one_run(lambda _: mine, range(2, 9), hosts=(), worker_count=workers)


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("options", [{}, {"last_batch": "fill", "epochs": 2}], ids=["endless", "filled"])
def test_a_plain_grain_data_loader_of_records_gives_the_same_batches(source, hosts, options):
    for index in range(hosts):
        mine = pipeline(source, Host(index, hosts), **options)
        operations = [*TRANSFORMS, grain.transforms.Batch(BATCH // hosts)]
        loader = grain.DataLoader(data_source=source, sampler=mine.sampler, operations=operations)
        assert_same_stream(itertools.islice(loader, 5), [mine[step] for step in range(5)])


def test_a_plain_grain_data_loader_with_workers_reads_every_row_once(source):
    """Each worker of Grain makes batches of its own rows, so their number changes the batches, but not the rows of an epoch."""
    sampler = IndexSampler(len(source), global_batch_size=20, seed=0, epochs=1)
    operations = [*TRANSFORMS, grain.transforms.Batch(10)]
    loader = grain.DataLoader(data_source=source, sampler=sampler, operations=operations, worker_count=2)
    assert sorted(row for batch in loader for row in rows_of(batch)) == list(range(ROWS))


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_the_iterator_ends_with_the_last_epoch(source, threads):
    mine = pipeline(source, epochs=3)
    assert len(mine) == len(mine.dataset()) == len(list(mine)) == 3 * STEPS
    for start, left in ((0, 6), (4, 2), (6, 0)):
        assert len(list(mine.iter(start_step=start, threads=threads))) == left
    assert len(list(mine.data_loader(start_step=4))) == 2
    with pytest.raises(GrainSftError, match="step=7"):
        mine.iter(start_step=7)
    with pytest.raises(IndexError, match="step=6"):
        mine[6]


def test_the_dataset_is_a_grain_map_dataset_that_accepts_further_transforms(source):
    mine = pipeline(source)
    dataset = mine.dataset().map(lambda batch: batch["inputs"].sum())
    assert isinstance(mine.dataset(), grain.MapDataset)
    assert [dataset[step] for step in (0, 5)] == [mine[0]["inputs"].sum(), mine[5]["inputs"].sum()]
    assert_same(mine.dataset()[1:9:2][2], mine[5])
    assert_same(next(iter(mine.dataset().to_iter_dataset())), mine[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_resumes_at_its_step_with_any_number_of_workers(source, workers):
    mine = pipeline(source, Host(1, 2))
    iterator = mine.iter(start_step=3)
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state["next_step"] == 4
    other = pipeline(source, Host(1, 2)).iter(worker_count=workers)
    next(other)
    other.set_state(state)
    assert other.next_step == 4
    assert_same_stream(itertools.islice(other, 3), [mine[step] for step in (4, 5, 6)])
    other.close()


def test_a_state_resumes_with_another_number_of_hosts_but_not_with_other_data(source):
    own = [Plain(2), *TRANSFORMS]
    state = pipeline(source, transforms=own).iter(start_step=5).get_state()
    resumed = pipeline(source, Host(1, 4), transforms=[Plain(2), *TRANSFORMS]).iter()
    resumed.set_state(state)
    assert resumed.next_step == 5
    for changed in ({"order": "olmo"}, {"transforms": TRANSFORMS}, {"transforms": [Plain(3), *TRANSFORMS]}):
        with pytest.raises(GrainSftError, match="another pipeline"):
            pipeline(source, **{"transforms": own} | changed).iter().set_state(state)
    changes = [*itertools.product(("amendments", "stages"), (5, [5])), ("next_step", "5")]
    for wrong in ({}, {"next_step": 5, "parts": {}}, {"next_step": -1}, *({**state, key: value} for key, value in changes)):
        with pytest.raises(GrainSftError, match=r"expected a list of texts|and 'pipeline'|step='5'|step=-1"):
            resumed.set_state(wrong)
    resumed.set_state({**state, "next_step": np.int64(7)})  # a checkpoint of arrays returns numpy integers
    assert resumed.get_state() == {**state, "next_step": 7}
    state, other = (pipeline(source, Host(0, count), order="maxtext").iter().get_state() for count in (2, 4))
    of_host_1 = pipeline(source, Host(1, 2), order="maxtext").iter()
    for text in (state["pipeline"], state["pipeline"].replace("index=0", "index=1")):  # the second is of version 0.1
        of_host_1.set_state({**state, "pipeline": text})
    with pytest.raises(GrainSftError, match="another pipeline"):
        of_host_1.set_state(other)


def test_grain_sets_the_next_index_and_restores_a_checkpoint(source, tmp_path):
    iterator = pipeline(source).iter(start_step=2)
    assert grain.experimental.get_next_index(iterator) == 2
    grain.experimental.set_next_index(iterator, 6)
    assert_same(next(iterator), pipeline(source)[6])
    handler = grain.checkpoint.CheckpointHandler()
    handler.save(epath.Path(tmp_path), iterator)
    assert_same(next(handler.restore(epath.Path(tmp_path), pipeline(source).iter())), pipeline(source)[7])


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_data_loader_resumes_from_its_own_state(source, workers):
    iterator, again = (iter(pipeline(source).data_loader(worker_count=workers, start_step=1)) for _ in range(2))
    list(itertools.islice(iterator, 3))
    again.set_state(iterator.get_state())
    assert_same(next(again), next(iterator))


class FailsOnce(grain.transforms.Map):
    """Fails once, at the batch that begins with row `row`. The file `mark` records that it has failed."""

    def __init__(self, row, mark):
        self.row, self.mark = row, mark

    def map(self, element):
        if element["tokens"][0, 0] // 100 == self.row and not self.mark.exists():
            self.mark.touch()
            raise GrainSftError("a disk that stumbled")
        return element


@pytest.mark.parametrize(("threads", "workers"), [(0, 0), (2, 0), (1, 1), pytest.param(1, 2, marks=pytest.mark.heavy)])
def test_a_step_that_failed_is_tried_again_and_no_step_is_lost(source, tmp_path, threads, workers):
    transforms = [FailsOnce(8, tmp_path / "mark"), ShiftTargets()]
    mine = pipeline(source, order="sequential", transforms=transforms, global_batch_size=4, epochs=1)
    iterator = mine.iter(threads=threads, worker_count=workers)
    assert [rows_of(next(iterator))[0] for _ in range(2)] == [0, 4]
    with pytest.raises(GrainSftError, match="stumbled"):
        next(iterator)
    assert iterator.get_state()["next_step"] == 2
    assert [rows_of(next(iterator))[0] for _ in range(3)] == [8, 12, 16]
    iterator.close()


def test_arrays_that_batches_share_are_read_only(source):
    # A new ShiftTargets, because threads of other tests may still use the one in TRANSFORMS.
    mine = pipeline(source, order="sequential", transforms=[ShiftTargets()], global_batch_size=4)
    one, other = mine[0], mine[2]
    for key in ("inputs_position", "targets_segmentation"):
        assert one[key] is other[key]
        with pytest.raises(ValueError, match="read-only"):
            one[key][0, 0] = 1
    one["inputs"][:] = 0
    assert mine[0]["inputs"].any()


NOT_COUNTS = [
    *[("iter", option, (-1, 1.5, "2")) for option in ("threads", "prefetch", "worker_count", "start_step")],
    ("data_loader", "start_step", (-1, 1.5, "3")),
    ("data_loader", "worker_count", (-1,)),
    ("__getitem__", "step", (-1, 1.5, "3")),
]


@pytest.mark.parametrize(("method", "option", "values"), NOT_COUNTS)
def test_the_error_names_an_option_that_is_not_a_count(source, method, option, values):
    for value in values:
        with pytest.raises(GrainSftError, match=f"{option.removeprefix('start_')}={value!r}"):
            getattr(pipeline(source), method)(**{option: value})


def test_a_positional_step_works_and_the_warning_names_the_keyword(source):
    mine = pipeline(source)
    with pytest.warns(DeprecationWarning, match=r"Write iter\(start_step=3\)"):
        assert mine.iter(3, threads=0).next_step == 3
    with pytest.warns(DeprecationWarning, match=r"Write data_loader\(worker_count=0, start_step=1\)"):
        assert_same(next(iter(mine.data_loader(0, 1))), mine[1])
    for more, named in (((2,), {}), ((), {"start_step": 2})):
        with pytest.raises(TypeError, match="positional"):
            mine.iter(1, *more, **named)


def test_the_error_names_parts_that_do_not_fit_together(source):
    sampler, fewer = pipeline(source).sampler, IndexSampler(59, global_batch_size=4, seed=0)
    for message, make in (
        ("needs the key 'tokens'.*place this transform", lambda: pipeline(source, transforms=TRANSFORMS[::-1])[0]),
        ("59 rows, but the source has 60", lambda: Pipeline(source, fewer, [ShiftTargets()])),
        ("not a grain.transforms.Map.*Remove a Batch", lambda: Pipeline(source, sampler, [grain.transforms.Batch(4)])),
        (r"Shift\w+ is a class. .* Write ShiftTargets\(\)\.", lambda: pipeline(source, transforms=[ShiftTargets])),
        (r"schedule is 5 .*a list of pairs \(step, global_batch_size\)", lambda: pipeline(source, schedule=5)),
    ):
        with pytest.raises(GrainSftError, match=message):
            make()
