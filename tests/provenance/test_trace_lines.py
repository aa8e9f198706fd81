"""Traces agree with delivered batches: each token is read again from the place that the trace states."""

import functools

import batches
import grain
import numpy as np
import pytest
from batches import assert_is_traced, assert_same
from sft_files import documents, write_episodes, write_olmo

from grain_sft import Host, NgramFilter, PackedLayout, PaddedLayout, ShiftTargets, WindowLayout, open_corpus
from grain_sft.errors import PipelineError, RowIndexError, SamplerError
from grain_sft.layout import MaterializedLayout, traits
from grain_sft.prepare.materialize import materialize
from grain_sft.provenance import checkpoint_table, find_document, iter_trace, summarize, trace
from grain_sft.sampling import ORDERS
from grain_sft.transforms import TrimToMultiple
from grain_sft.view import view_rows

LENGTH = 16
PACKED = ("best_fit_decreasing", "first_fit_decreasing", "concat_then_split")
BY_EPOCH = ("multipack", "shuffled_best_fit")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Layouts by name, of a corpus with masks and sources. Its files of 100 tokens end inside documents."""
    folder = tmp_path_factory.mktemp("trace")
    write_olmo(folder / "parts", documents(70, longest=25), sources=True)
    corpus = open_corpus(folder / "parts", dtype="uint16", eos_token_id=2)
    made = {"windows": WindowLayout(corpus, LENGTH), "padded": PaddedLayout(corpus, LENGTH, min_tokens=4)}
    for name in (*PACKED, *BY_EPOCH):
        options = {"seed": 5, "epochs": 3, "batch_rows": 4} if name in BY_EPOCH else {}
        made[name] = PackedLayout(corpus, LENGTH, algorithm=name, cache_dir=folder, **options)
    materialize(made["best_fit_decreasing"], folder / "rows", shard_bytes=8 * LENGTH * 2)
    return made | {"materialized": MaterializedLayout(open_corpus(folder / "rows"))}


pipeline_of = functools.partial(batches.pipeline_of, seed=7, epochs=2)


CASES = [(layout, order) for layout in ("windows", "padded", *PACKED, "materialized") for order in ORDERS]
CASES += [(layout, "sequential") for layout in BY_EPOCH]


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize(("name", "order"), CASES)
def test_a_trace_is_what_the_pipeline_delivers(layouts, name, order, hosts):
    options = {"order": order, "epochs": 1 if name in BY_EPOCH else 2}
    pipelines = [pipeline_of(layouts[name], host=Host(index, hosts), **options) for index in range(hosts)]
    sampler = pipelines[0].sampler
    border = sampler.steps_per_epoch // (3 if name in BY_EPOCH else 1)
    steps = range(max(0, border - 3), min(sampler.num_steps, border + 3))
    found = trace(pipelines[-1], steps)
    assert_is_traced(found, pipelines, steps)
    assert len(set(found.epoch.tolist())) == 2
    whole = trace(pipelines[0], range(sampler.num_steps), trainable=False, block_rows=8)
    for index, pipeline in enumerate(pipelines):
        narrowed = trace(pipeline, range(sampler.num_steps), host=Host(index, hosts), trainable=False)
        assert_same(narrowed.columns(), whole.select(whole.host == index).columns())


@pytest.mark.parametrize("order", ["olmo", "shuffle", "episode", "sequential"])
@pytest.mark.parametrize("last_batch", ["fill", "run_on"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_last_batches_that_are_filled_or_run_on_are_traced(layouts, order, last_batch, hosts):
    layout = layouts["best_fit_decreasing"]
    options = {"order": order, "global_batch_size": 6 if len(layout) % 6 else 10, "last_batch": last_batch}
    pipelines = [pipeline_of(layout, host=Host(index, hosts), **options) for index in range(hosts)]
    border = pipelines[0].sampler.steps_per_epoch
    steps = range(border - 2, min(border + 2, pipelines[0].sampler.num_steps))
    found = trace(pipelines[0], steps)
    assert_is_traced(found, pipelines, steps)
    filled = found.select(found.instance < 0)
    assert bool(len(filled)) == (last_batch == "fill")
    for name in ("segment", "shard", "document", "source", "record"):
        assert (filled.columns()[name] == -1).all()
    real = trace(pipelines[0], range(pipelines[0].sampler.num_steps))
    for epoch in range(2):
        seen = real.instance[(real.epoch == epoch) & (real.instance >= 0)]
        assert len(set(seen.tolist())) == len(layout) or (last_batch == "run_on" and epoch == 1)


TRANSFORMS = [
    (NgramFilter(max_period=3, max_count=3), ShiftTargets()),
    (TrimToMultiple(4), ShiftTargets()),
    (NgramFilter(max_count=3), TrimToMultiple(8), ShiftTargets(), TrimToMultiple(2)),
]


@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_trainable_tokens_are_those_that_transforms_leave(tmp_path, transforms):
    for weights, shards in ((False, 1), (True, 3)):
        docs = documents(80, high=6, longest=40, weights=weights)
        path = write_episodes(tmp_path / f"{shards}", docs, shards=shards)
        layout = PackedLayout(open_corpus(path), 32, cache_dir=tmp_path)
        pipeline = pipeline_of(layout, transforms=transforms)
        steps = range(pipeline.sampler.num_steps)
        found = trace(pipeline, steps)
        assert_is_traced(found, [pipeline], steps)
        plain = trace(pipeline_of(layout), steps)
        assert (plain.trainable != found.trainable).any() == any(isinstance(each, NgramFilter) for each in transforms)


def assert_spans(found, layout):
    """Assert that the lines of a trace in order `sequential` are the spans of the layout's rows."""
    lines = zip(found.instance, found.document, found.shard, found.start, found.stop, strict=True)
    spans = [(row, span) for row in np.unique(found.instance).tolist() for span in layout.spans(row)]
    expected = [(row, span.document, span.shard, span.start, span.stop) for row, span in spans]
    assert [tuple(map(int, line)) for line in lines] == expected


def test_lines_of_a_trace_state_documents_and_their_sources(layouts):
    for name in ("padded", *PACKED, *BY_EPOCH, "materialized"):
        layout = layouts[name]
        pipeline = pipeline_of(layout, order="sequential", epochs=1)
        found = trace(pipeline, range(pipeline.sampler.num_steps))
        assert_spans(found, layout)
        sources = layout.corpus.sources
        assert (found.source == sources[found.document, 0]).all()
        assert (found.record == sources[found.document, 1]).all()
        assert found.source_names == ("", "", "")
    windows = trace(pipeline_of(layouts["windows"]), range(3))
    assert (windows.document == -1).all() and (windows.record == -1).all()


@pytest.mark.parametrize("algorithm", BY_EPOCH)
def test_epochs_may_be_packed_to_different_numbers_of_rows(tmp_path, algorithm):
    write_olmo(tmp_path / "parts", documents(150, longest=25, seed=3))
    corpus = open_corpus(tmp_path / "parts", dtype="uint16", eos_token_id=2)
    layout = PackedLayout(corpus, LENGTH, algorithm=algorithm, seed=1, epochs=12, batch_rows=2, cache_dir=tmp_path)
    counts = [len(plan.ends) for plan in layout.plans]
    assert min(np.diff(counts)) < 0 < max(np.diff(counts))
    pipeline = pipeline_of(layout, order="sequential", epochs=1, global_batch_size=2)
    found = trace(pipeline, range(pipeline.sampler.num_steps))
    assert_spans(found, layout)
    assert np.unique(found.instance).tolist() == list(range(pipeline.sampler.num_steps * 2))
    epochs = found.epoch[np.unique(found.instance, return_index=True)[1]].tolist()
    assert np.bincount(epochs).tolist()[:-1] == counts[:-1]
    assert checkpoint_table(pipeline, 1)["epoch"][:-1] == epochs[2::2]
    assert [view.epoch for step in range(pipeline.num_steps) for view in view_rows(pipeline, step)] == epochs


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(("name", "order"), CASES)
def test_find_document_finds_all_lines_that_a_trace_of_all_steps_has(layouts, name, order, hosts):
    layout = layouts[name]
    pipeline = pipeline_of(layout, order=order, host=Host(0, hosts), epochs=1 if name in BY_EPOCH else 3)
    whole = trace(pipeline, range(pipeline.sampler.num_steps))
    starts, lengths = layout.corpus.documents
    begins = np.cumsum([0] + [shard.num_tokens for shard in layout.corpus.shards])
    for number in (0, 3, 17, len(starts) - 1, [5, 9, 33]):
        found = find_document(pipeline, number)
        chosen = np.isin(whole.document, number)
        for each in np.atleast_1d(number) if name == "windows" else ():
            first, stop = begins[whole.shard] + whole.start, begins[whole.shard] + whole.stop
            chosen |= (first < starts[each] + lengths[each]) & (stop > starts[each])
        expected = whole.select(chosen)
        assert_same(found.columns(), expected.columns())
        last = Host(hosts - 1, hosts)
        mine = find_document(pipeline, number, host=last, trainable=False)
        assert mine.step.tolist() == expected.step[expected.host == last.index].tolist()


def test_a_sampler_without_end_is_searched_for_a_number_of_epochs(layouts):
    pipeline = pipeline_of(layouts["padded"], epochs=None)
    number = layouts["padded"].spans(0)[0].document
    assert find_document(pipeline, number).epoch.tolist() in ([0], [])
    found = find_document(pipeline, number, epochs=40)
    assert 30 < len(found) <= 40 and (np.diff(found.epoch) > 0).all()
    in_random_order = pipeline_of(layouts["padded"], order="random", epochs=None)
    assert find_document(in_random_order, number, epochs=40).step.max() > 100
    last = trace(pipeline, range(10**6, 10**6 + 1))
    assert last.instance[np.unique(last.row, return_index=True)[1]].tolist() == pipeline.sampler.rows(10**6).tolist()


def test_steps_documents_epochs_and_hosts_that_do_not_exist_are_refused(layouts):
    pipeline = pipeline_of(layouts["padded"])
    steps = pipeline.sampler.num_steps
    for error, words, call, asked, options in (
        (RowIndexError, f"steps from 0 to {steps - 1}", trace, range(3, steps + 1), {}),
        (RowIndexError, "consecutive steps", trace, range(0, 4, 2), {}),
        (RowIndexError, "consecutive steps", trace, [3, 9], {}),
        (RowIndexError, "document 70", find_document, 70, {}),
        (RowIndexError, "document=1.7: expected an integer", find_document, 1.7, {}),
        (SamplerError, "epochs=3", find_document, 0, {"epochs": 3}),
        (SamplerError, "3 hosts", trace, range(2), {"host": Host(0, 3)}),
    ):
        with pytest.raises(error, match=words):
            call(pipeline, asked, **options)
    assert len(trace(pipeline, range(2, 2))) == 0
    growing, host = pipeline_of(layouts["padded"], schedule=[(2, 8)]), Host(1, 8)
    assert set(trace(growing, range(2, 4), host=host).host) == {1}
    with pytest.raises(SamplerError, match="8 hosts"):
        trace(growing, range(1, 4), host=host)


def test_tokens_with_loss_are_counted_if_a_transform_removes_or_cuts_the_mask(layouts):
    for change in (
        lambda element: {"inputs": element["tokens"]},
        lambda element: {key: array[:, :9] for key, array in element.items()},
        lambda element: element | {"loss_mask": element["loss_mask"].astype(np.float32)},
    ):
        transform = type("Changed", (grain.transforms.Map,), {"map": staticmethod(change)})()
        pipeline = pipeline_of(layouts["padded"], [transform])
        element = pipeline.source.read(pipeline.sampler.rows(0))
        mask = change(element).get("loss_mask", element["loss_mask"])
        assert trace(pipeline, range(1)).trainable.sum() == np.count_nonzero(mask[:, 1:]) > 0
    failing = type("Failing", (grain.transforms.Map,), {"map": lambda self, element: 1 / 0})()
    with pytest.raises(PipelineError, match="Failing: ZeroDivisionError"):
        trace(pipeline_of(layouts["padded"], [failing]), range(1))


def test_the_parts_of_iter_trace_join_to_the_trace(layouts):
    pipeline = pipeline_of(layouts["best_fit_decreasing"])
    parts = list(iter_trace(pipeline, range(1, 12), block_rows=12))
    assert [set(part.step.tolist()) for part in parts] == [{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {10, 11}]
    whole = trace(pipeline, range(1, 12)).columns()
    assert_same({name: np.concatenate([part.columns()[name] for part in parts]) for name in whole}, whole)
    assert {part.receipt for part in parts} == {pipeline.receipt.code}


def test_a_trace_reads_the_file_of_sources_once(tmp_path, calls_of):
    write_olmo(tmp_path / "sft", documents(20), sources=True)
    layout = PackedLayout(open_corpus(tmp_path / "sft", dtype="uint16", eos_token_id=2), LENGTH, cache_dir=tmp_path)
    reads = calls_of(traits, "read_sources")
    assert trace(pipeline_of(layout), range(1)).record.min() > 0 and len(reads) == 1


class EvenRows(WindowLayout):
    """Windows whose even rows are parts of document 0, and whose odd rows are outside all documents."""

    follows_documents = True

    def pieces(self, rows):
        pieces = super().pieces(rows)
        return pieces._replace(document=-(rows[pieces.row] % 2))


def test_tokens_outside_all_documents_have_no_source(tmp_path):
    write_olmo(tmp_path, documents(20), sources=True)
    lines = trace(pipeline_of(EvenRows(open_corpus(tmp_path, dtype="uint16", eos_token_id=2), LENGTH)), range(2))
    even = lines.instance % 2 == 0
    assert ((lines.source == 0) == even).all() and ((lines.record > 0) == even).all() and 0 < even.sum() < len(lines)
    assert summarize(lines)["tokens"] == [(lines.stop - lines.start)[even].sum()]
