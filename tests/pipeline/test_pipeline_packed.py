"""Every way to read a pipeline gives the same batches, for each layout and number of hosts."""

import numpy as np
import pytest
from batches import Applies, assert_one_run, assert_same, pipeline_of
from sft_files import documents, write_episodes

import grain_sft
from grain_sft import Host, NgramFilter, NpyDataSource, PackedLayout, PaddedLayout, Pipeline, ShiftTargets, WindowLayout
from grain_sft.errors import LayoutError, PipelineError, RowIndexError, WrongTypeError
from grain_sft.observers import Observer
from grain_sft.pipeline import Amendment, Stage, StagedPipeline
from grain_sft.source import MixtureSource
from grain_sft.storage import RemoteOptions

LENGTH = 32
BATCH = 6


@pytest.fixture(params=["windows", "padded", "packed", "shuffled_best_fit", "multipack"])
def source(request, tmp_path):
    docs = documents(100, weights=True, longest=40)
    corpus = grain_sft.open_corpus(write_episodes(tmp_path / "chats", docs, shards=3))
    plain = {"windows": WindowLayout, "padded": PaddedLayout, "packed": PackedLayout}
    if request.param in plain:
        return NpyDataSource(plain[request.param](corpus, LENGTH))
    return NpyDataSource(PackedLayout(corpus, LENGTH, algorithm=request.param, seed=1, epochs=2, batch_rows=BATCH))


def pipeline(source, host=Host(0, 1), **options):
    options = {"seed": 3, "global_batch_size": BATCH, "epochs": 2, **options}
    return pipeline_of(source.layout, [NgramFilter(), ShiftTargets()], host=host, **options)


def test_every_way_to_read_a_pipeline_gives_the_same_batches_for_every_number_of_hosts(source):
    assert_one_run(lambda host: pipeline(source, host), range(3, 8), hosts=(1, 2, 3, 6))
    whole = pipeline(source)
    assert len(list(whole.iter())) == len(list(whole.data_loader())) == len(whole)


def test_a_transform_that_changes_the_number_of_rows_is_named(source):
    def keeping(count):
        """Return a run that keeps the first `count` rows of each batch, and adds an array that has no rows."""
        keep = Applies(lambda batch: {key: array[:count] for key, array in batch.items()} | {"scale": np.ones(1)})
        return Pipeline(source, pipeline(source).sampler, [ShiftTargets(), keep])

    assert len(keeping(BATCH)[1]["inputs"]) == BATCH
    with pytest.raises(PipelineError, match=rf"step 1: .*Applies.* {BATCH - 1} rows of .*; expected the {BATCH}"):
        keeping(BATCH - 1)[1]


NO_BATCH = (
    (lambda batch: next(iter([])), "StopIteration: "),
    (lambda batch: batch["none"], "KeyError: "),
    (lambda batch: None, "returned None"),
)


def test_a_transform_that_returns_no_batch_is_an_error_not_the_end_of_the_run(source):
    for function, found in NO_BATCH:
        run = Pipeline(source, pipeline(source).sampler, [ShiftTargets(), Applies(function)])
        for threads in (0, 2):
            with pytest.raises(PipelineError, match=f"step 0: .*Applies.*{found}"):
                list(run.iter(threads=threads))


class Raises(Observer):
    """Raises `StopIteration` for each batch that is handed out."""

    def batch_handed_out(self, *_):
        next(iter([]))


@pytest.mark.parametrize("last", [False, True])
def test_an_observer_that_raises_stop_iteration_is_an_error_not_the_end_of_the_run(source, last, monkeypatch):
    run = Pipeline(source, pipeline(source, epochs=1).sampler, [ShiftTargets()], observers=[Raises()])
    start = run.num_steps - 1 if last else 0
    with pytest.raises(PipelineError, match=f"step {start}: an observer .*StopIteration"):
        list(run.iter(start_step=start))
    monkeypatch.setattr(Raises, "batch_made", Raises.batch_handed_out)
    for batches in (run.dataset()[start:], run.data_loader(start_step=start)):
        with pytest.raises(PipelineError, match=f"step {start}: an observer .*StopIteration"):
            list(batches)


def test_an_evaluation_reads_every_row_once_and_fills_its_last_batch_with_padding(source):
    batches = pipeline(source, order="sequential", epochs=1, last_batch="fill")
    found = [batches[step] for step in range(len(batches))]
    assert len(found) == -(-len(source) // BATCH) and all(batch["inputs"].shape == (BATCH, LENGTH) for batch in found)
    joined = {key: np.concatenate([batch[key] for batch in found]) for key in found[0]}
    expected = ShiftTargets().map(source.read(range(len(source))))
    assert_same({key: array[: len(source)] for key, array in joined.items()}, expected)
    assert not any(array[len(source) :].any() for key, array in joined.items() if key != "inputs")
    assert set(joined["inputs"][len(source) :].ravel().tolist()) <= {source.layout.corpus.pad_token_id}


def test_arguments_of_other_types_are_errors_that_state_the_expected_type(source):
    layout, sampler, skip = source.layout, pipeline(source).sampler, Amendment(0, skip=1)
    for message, make in (
        (r"layout is Corpus.*expected a layout, such as WindowLayout", lambda: NpyDataSource(layout.corpus)),
        (r"source is \w+Layout.*expected NpyDataSource\(layout\)", lambda: Pipeline(layout, sampler)),
        (r"sampler is 5.*expected a sampler, such as IndexSampler", lambda: Pipeline(source, 5)),
        (r"transforms is .*expected a list", lambda: Pipeline(source, sampler, iter([ShiftTargets()]))),
        (r"observers is .*expected a list", lambda: Pipeline(source, sampler, observers=Observer())),
        ("an item is .*expected an object of Observer", lambda: Pipeline(source, sampler, observers=[Observer])),
        (r"amendments: an item is .*expected an object of Amend", lambda: Pipeline(source, sampler, amendments=[{}])),
        (r"stages: an item is .*expected an object of Stage", lambda: StagedPipeline([source])),
        (r"source is \w+Layout.*expected NpyDataSource\(layout\)", lambda: Stage(layout, sampler)),
        (r"sources: an item is \w+Layout.*expected an object of RowSource", lambda: MixtureSource({"a": layout})),
        (r"slots=\[0\.5\]: expected a sequence of integers", lambda: Pipeline(source, sampler).read(0, [0.5])),
        (r"amendments is 5.*expected a list", lambda: Stage(source, sampler, amendments=5)),
        ("has 0 items, but the run has 1", lambda: StagedPipeline([Stage(source, sampler, amendments=[])], amendments=[skip])),
        (r"transforms is 5.*expected a list", lambda: Stage(source, sampler, 5)),
        (r"other is None.*expected the `parts`", lambda: Pipeline(source, sampler).receipt.differences(None)),
        (r"before is 'x'.*expected a step", lambda: Pipeline(source, sampler).receipt.differences({}, "x")),
        *((f"max_open_files={n!r}: expected", lambda n=n: NpyDataSource(layout, max_open_files=n)) for n in ("3", 0)),
        (r"remote: seconds is 'x'.*expected a number", lambda: RemoteOptions(seconds="x")),
        (r"remote: cache is 5.*expected CacheOptions", lambda: RemoteOptions(cache=5)),
        (r"columns=\(1,\): expected two integers", lambda: Pipeline(source, sampler).read(0, [0], columns=(1,))),
        ("threads=1000000000: expected at most 10000", lambda: pipeline(source).iter(threads=10**9)),
        (r"path is 5.*expected a path", lambda: Pipeline(source, sampler, audit=5)),
        (r"state is .*expected bytes", lambda: iter(pipeline(source).data_loader()).set_state({"next_step": 3})),
    ):
        with pytest.raises((WrongTypeError, LayoutError, PipelineError, RowIndexError), match=message):
            make()
