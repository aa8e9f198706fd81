"""Each source of a mixture keeps its own order, for any number of hosts, from any step and under any schedule."""

import dataclasses
import functools
import pickle

import grain
import numpy as np
import pytest
from batches import assert_one_run, assert_same, load, put, rows_of_hosts
from mixed_corpora import LENGTH, mixed, mixture_config

import grain_sft
from grain_sft import Host, IndexSampler, NpyDataSource, Pipeline, WindowLayout
from grain_sft.errors import CorpusError, GrainSftError, PipelineError, RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.provenance import trace
from grain_sft.sampling import Mixture, MixtureSampler, SourceOrder
from grain_sft.source import MixtureSource


def test_each_sources_rows_come_in_its_own_order(folder):
    """An `IndexSampler` of the source alone, with batches of one row, reads the same rows, epoch after epoch."""
    pipeline = mixed(folder)
    layout, sampler = pipeline.source.layout, pipeline.sampler
    rows = np.concatenate([sampler.rows(step) for step in range(60)])
    part = layout.parts_of(rows)
    for number, (order, seed, tenths) in enumerate([("olmo", 5, 7), ("episode", 3, 2), ("shuffle", 3, 1)]):
        size = len(layout.parts[layout.names[number]])
        alone = IndexSampler(size, global_batch_size=1, seed=seed, order=order)
        drawn = rows[part == number] - layout.first_rows[number]
        assert drawn.tolist() == [int(alone.rows(step)[0]) for step in range(len(drawn))]
        assert len(drawn) > size or number == 2  # chat (0) and talks (1) begin a second epoch; web (2) is not used up
        assert (np.abs(10 * np.cumsum(part == number) - tenths * np.arange(1, len(part) + 1)) < 10).all()


def test_all_batches_have_the_same_keys_shapes_and_dtypes_and_the_values_of_their_sources(folder):
    pipeline = mixed(folder)
    for step in range(8):
        batch, rows = pipeline[step], pipeline.sampler.rows(step)
        assert {array.shape for array in batch.values()} == {(12, LENGTH)}
        assert [key for key, array in batch.items() if array.dtype != np.int32] == ["targets_weights"]
        assert batch["targets_weights"].dtype == np.float32
        for place, row in enumerate(rows.tolist()):
            part = int(pipeline.source.layout.parts_of(np.array([row]))[0])
            own = row - int(pipeline.source.layout.first_rows[part])
            expected = dict(grain_sft.ShiftTargets().map(list(pipeline.source.sources.values())[part][own]))
            expected.setdefault("targets_weights", expected["targets_segmentation"] != 0)
            for key, array in expected.items():
                np.testing.assert_array_equal(batch[key][place], array, err_msg=key)
        assert (batch["inputs"][batch["inputs_segmentation"] == 0] <= 2).all()


def test_hosts_workers_threads_resumes_and_pickles_give_the_same_batches(folder):
    assert_one_run(functools.partial(mixed, folder), range(7, 11), hosts=(2, 3, 4), worker_count=1)
    whole = mixed(folder)
    with pytest.raises(PipelineError, match="another pipeline"):
        mixed(folder, seed=4).iter().set_state(whole.iter(start_step=7).get_state())
    sampler = MixtureSampler(**whole.sampler.__getstate__())
    operations = [*whole.transforms, grain.transforms.Batch(12)]
    records = iter(grain.DataLoader(data_source=whole.source, sampler=sampler, operations=operations))
    for step in range(3):
        assert_same(next(records), whole[step])


def test_a_schedule_changes_weights_and_batch_sizes_but_no_batch_before_its_steps(folder):
    schedule = [
        {"step": 5, "weights": {"chat": 0.1, "web": 0.7}},
        {"step": 9, "global_batch_size": 24},
        {"step": 12, "global_batch_tokens": 6 * LENGTH, "weights": {"talks": 0}},
    ]
    plain, changed = mixed(folder), mixed(folder, schedule=schedule)
    rows = [changed.sampler.rows(step) for step in range(30)]
    assert [len(each) for each in rows] == [12] * 9 + [24] * 3 + [6] * 18
    for step in range(5):
        assert rows[step].tolist() == plain.sampler.rows(step).tolist()
    part = changed.source.layout.parts_of(np.concatenate(rows))
    share = np.zeros(3)
    for row in range(len(part)):  # weights change at step 5, which is row 60, and at step 12, which is row 180
        share += (0.7, 0.2, 0.1) if row < 60 else (0.1, 0.2, 0.7) if row < 180 else (0.125, 0, 0.875)
        assert np.abs(share - np.bincount(part[: row + 1], minlength=3)).max() < 1 + 1e-9
    assert (part[180:] != 1).all()
    for hosts in (2, 3, 6):
        parts = [changed.sampler.with_host(Host(index, hosts)) for index in range(hosts)]
        for step in (4, 5, 8, 9, 11, 12, 29):
            assert rows_of_hosts(parts, step).tolist() == rows[step].tolist()
    for step in range(2, 170):  # a sampler that has read earlier steps has the rows of a fresh copy
        in_turn = parts[2].rows(step)
        np.testing.assert_array_equal(in_turn, pickle.loads(pickle.dumps(parts[2])).rows(step), err_msg=f"step {step}")
        in_turn[:] = -9  # the caller may overwrite the rows
    four = mixed(folder, Host(0, 4), schedule=schedule)
    assert len(four.sampler.rows(11)) == 6
    with pytest.raises(SamplerError, match="global_batch_size=6, from step 12 on, can't be divided by 4 hosts"):
        four.iter(start_step=3)


@pytest.mark.parametrize("on_exhausted", ["stop", "renormalize"])
@pytest.mark.parametrize("last_batch", ["drop", "fill"])
def test_an_exhausted_source_ends_the_run_or_leaves_its_share_to_the_others(folder, on_exhausted, last_batch):
    config = mixture_config(folder, on_exhausted=on_exhausted, last_batch=last_batch)
    for source in config["corpus"]["mixture"].values():
        source.setdefault("sampler", {})["epochs"] = 1
    pipeline = load(config)
    batches = list(pipeline)
    rows = np.concatenate([pipeline.sampler.rows(step) for step in range(len(batches))])
    real = rows[rows != FILL_ROW]
    assert len(set(real.tolist())) == len(real)
    assert len({tuple((key, array.shape, array.dtype) for key, array in batch.items()) for batch in batches}) == 1
    left = pipeline.sampler.length - len(real)
    assert left == 0 if last_batch == "fill" else 0 <= left < 12
    if on_exhausted == "renormalize":
        assert pipeline.sampler.length == len(pipeline.source)
    assert (batches[-1]["targets_segmentation"][rows[-12:] == FILL_ROW] == 0).all()
    with pytest.raises(IndexError):
        pipeline[len(batches)]


def test_each_source_may_have_its_own_max_epochs_and_on_exhausted(folder):
    config = mixture_config(folder)
    sources = config["corpus"]["mixture"]
    sources["talks"] |= {"max_epochs": 1, "on_exhausted": "renormalize"}
    sources["web"] |= {"max_epochs": 1, "on_exhausted": "fail"}
    plain, pipeline = mixed(folder), load(config)
    sizes = {name: len(part) for name, part in pipeline.source.layout.parts.items()}
    assert pipeline.num_steps is None
    drawn = {name: 0 for name in sizes}
    message = "source web has no row left after its epochs, and on_exhausted is 'fail'"
    with pytest.raises(SamplerError, match=message) as error:
        for step, batch in enumerate(pipeline.iter(threads=0)):
            rows = pipeline.sampler.rows(step)
            if drawn["talks"] < sizes["talks"] - 12:
                assert_same(batch, plain[step])
            for number, name in enumerate(sizes):
                drawn[name] += int((pipeline.source.layout.parts_of(rows) == number).sum())
    assert f"step {step + 1}:" in str(error.value) and pipeline.sampler.failing_step == step + 1
    assert drawn["talks"] == sizes["talks"] and sizes["web"] - 12 < drawn["web"] <= sizes["web"]
    with pytest.raises(SamplerError, match="a source takes stop, renormalize or fail"):
        SourceOrder(5, 1, epochs=2, on_exhausted="repeat")
    sources["web"]["on_exhausted"] = "stop"
    assert len(load(config)) == step + 1
    amended = config | {"amendments": [{"reweight": {"from": step, "weights": {"web": 0}}}]}
    assert (load(amended).sampler.rows(step + 50) < len(plain.source) - sizes["web"]).all()


def test_a_source_that_an_earlier_stage_exhausted_leaves_its_share_to_the_others(folder):
    config = mixture_config(folder)
    config["corpus"]["mixture"]["talks"] |= {"max_epochs": 1, "on_exhausted": "renormalize"}
    later = load(config | {"stages": [{"steps": 40}, {"steps": 30}]}).stages[1]
    drawn = later.source.layout.parts_of(np.concatenate([later.sampler.rows(step) for step in range(40, 70)]))
    assert np.abs(np.bincount(drawn, minlength=3) - np.array([7, 0, 1]) * 45).max() < 1


def test_huge_max_epochs_are_an_error_and_a_huge_weight_leaves_no_rows_to_other_sources(folder):
    config = mixture_config(folder)
    sources = config["corpus"]["mixture"]
    sources["talks"] |= {"max_epochs": 1 << 62, "on_exhausted": "renormalize"}
    with pytest.raises(SamplerError, match=r"a mixture counts its rows up to 2\^62; found \d+"):
        load(config)
    sources["talks"]["max_epochs"] = 1
    sources["web"]["weight"] = 10**30
    pipeline = load(config)
    assert pipeline.num_steps is None and set(pipeline.source.layout.parts_of(pipeline.sampler.rows(9))) == {2}


def test_an_amendment_keeps_a_later_change_of_the_schedule_to_the_same_weight(folder):
    """The schedule gives chat the weight 0.1 at step 9, as the amendment at step 3 does. Between them, step 7 gives it 3."""
    sampler = mixed(folder, schedule=[{"step": 9, "weights": {"chat": 0.1}}]).sampler
    once, twice = sampler.reweighted([(7, {"chat": 3})]), sampler.reweighted([(3, {"chat": 0.1}), (7, {"chat": 3})])
    assert twice.mixture.schedule[1:] == once.mixture.schedule


def test_a_mixture_of_mixtures_divides_its_rows_by_its_own_weights(folder):
    config = mixture_config(folder)
    sources = config["corpus"]["mixture"]
    inner = {"talks": {**sources.pop("talks"), "weight": 1}, "web": {**sources.pop("web"), "weight": 3}}
    sources["others"] = {"weight": 0.3, "mixture": inner, "schedule": [{"step": 6, "weights": {"talks": 1, "web": 1}}]}
    pipeline = load(config)
    layout = pipeline.source.layout
    assert layout.names == ("chat", "others/talks", "others/web")
    part = layout.parts_of(np.concatenate([pipeline.sampler.rows(step) for step in range(30)]))
    assert (np.abs(10 * np.cumsum(part == 0) - 7 * np.arange(1, len(part) + 1)) < 10).all()
    before = int((part[:72] != 0).sum())
    inside = part[part != 0] == 1
    share = np.cumsum(np.where(np.arange(len(inside)) < before, 0.25, 0.5))
    assert (np.abs(np.cumsum(inside) - share) < 1).all()
    assert any(name.startswith("others/") for name in trace(pipeline, range(12)).source_names)
    assert_same(pickle.loads(pickle.dumps(pipeline))[11], pipeline[11])


def test_the_receipt_of_a_mixture_depends_on_all_that_decides_its_rows(folder):
    config = mixture_config(folder)
    codes = [mixed(folder).receipt.code]
    chat = {"weight": 0.6, "sampler.order": "shuffle", "sampler.seed": 6, "layout.kind": "padded", "pad_token_id": 9}
    codes += [load(put(config, f"corpus.mixture.chat.{key}", value)).receipt.code for key, value in chat.items()]
    changes = {"global_batch_size": 24}, {"weights": {"chat": 0.6}}
    codes += [mixed(folder, schedule=[{"step": 9, **change}]).receipt.code for change in changes]
    assert len(set(codes)) == len(codes)
    assert mixed(folder, Host(1, 2)).receipt.code == codes[0]
    for source, weight in zip(config["corpus"]["mixture"].values(), (7, 2, 1), strict=True):
        source["weight"] = weight
    assert load(config).receipt.code == codes[0]
    ending = put(put(config, "sampler.on_exhausted", "stop"), "corpus.mixture.web.sampler", {"epochs": 2})
    assert load(put(ending, "corpus.mixture.web.max_epochs", None)).receipt == load(ending).receipt


MISTAKES = [
    ("corpus.path", "a", "is given as well as 'path'. Give one of the two"),
    ("corpus.mixture", {}, "corpus.mixture: names no source"),
    ("corpus.mixture.chat.weight", -1, "weight of 'chat': -1; expected a number from 0 on"),
    ("corpus.mixture.chat.layout.keep", "first", "chat.layout.keep is an option of kind padded"),
    ("corpus.mixture.web.layout", {"sequence_length": 8}, "expected one sequence length, found"),
    ("corpus.mixture.web.sampler", {"global_batch_size": 8}, "web.sampler: unknown key 'global_batch_size'"),
    ("corpus.mixture.web.on_exhausted", "stop", "source 'web': .*: the source is never exhausted. Give it .*max_epochs"),
    ("corpus.mixture.web.max_epochs", 2, "source 'web' ends .* but on_exhausted='repeat'"),
    ("corpus.mixture.web", {"weight": 1, "path": "x", "max_epochs": 2, "sampler": {"epochs": 2}}, "is the same"),
    ("corpus.mixture.web.sampler", {"epochs": 2}, "source 'web' ends .* but on_exhausted='repeat'"),
    ("corpus.mixture.chat.layout.algorithm", "multipack", "multipack makes whole batches"),
    ("corpus.mixture.chat.layout", {"kind": "packed", "algorithm": "shuffled_best_fit", "seed": 1}, "sequential"),
    ("corpus.mixture.chat.layout", {"kind": "packed", "algorithm": "shuffled_best_fit"}, "Give layout.seed"),
    ("sampler.epochs", 2, "sampler.epochs: the sources of a mixture have epochs of their own"),
    ("sampler.last_batch", "run_on", "the sources of a mixture always run on"),
    ("sampler.on_exhausted", "stop", "no source is ever exhausted"),
    ("sampler.schedule", [{"step": 5, "global_batch_size": 4}] * 2, r"schedule\[1\].step is 5, after step 5"),
    ("sampler.schedule", [{"step": 1 << 62, "weights": {"chat": 0.1}}], r"counts its rows up to 2\^62; found \d+"),
    ("sampler.schedule", [{"step": 5}], "give what changes at step 5"),
    ("sampler.schedule", [{"step": 5, "weights": {"chta": 4}}], "nearest known: 'chat'"),
    ("sampler.schedule", [{"step": 5, "global_batch_tokens": 4}], "less than one row of layout.sequence_length=16"),
]


@pytest.mark.parametrize(("place", "value", "message"), MISTAKES)
def test_the_error_of_a_wrong_mixture_names_the_mistake(folder, place, value, message):
    with pytest.raises(GrainSftError, match=message):
        load(put(mixture_config(folder), place, value))


def test_samplers_sources_and_keys_that_do_not_belong_together_are_refused(folder):
    web = NpyDataSource(WindowLayout(grain_sft.open_corpus(folder / "web.npy", dtype="uint8"), LENGTH))
    for changed in ({"on_exhausted": "stop"}, {"schedule": [{"step": 3, "weights": {"a": 1}}]}):
        config = {**mixture_config(folder, **changed), "corpus": {"path": str(folder / "web.npy"), "dtype": "uint8"}}
        with pytest.raises(GrainSftError, match=r"is for a mixture|unknown key 'weights'"):
            load(config)
    source = MixtureSource({"a": web, "b": web})
    with pytest.raises(PipelineError, match="Make a MixtureSampler"):
        Pipeline(source, IndexSampler(80, global_batch_size=8, seed=0))
    rows = SourceOrder(40, 1)
    Pipeline(source, MixtureSampler(Mixture({"a": (1, rows), "b": (1, rows)}), global_batch_size=8))
    with pytest.raises(PipelineError, match="the sampler is for these sources"):
        Pipeline(source, MixtureSampler(Mixture({"b": (1, rows), "a": (1, rows)}), global_batch_size=8))
    for weights, expected in (({"a": 1}, "one for each of a, b"), (3, r"at step 5 is 3 .*expected weights by name")):
        with pytest.raises(GrainSftError, match=expected):
            Mixture({"a": (1, rows), "b": (1, rows)}, schedule=((5, weights),))
    with pytest.raises(IndexError):
        source.read([80])
    assert len(MixtureSource({"outer": source, "c": web}).read([119])["tokens"]) == 1  # a source may be a mixture


def test_an_inner_mixture_that_ends_may_not_have_a_schedule():
    """Its end would be computed without the schedule, and rows of `a` would be read again after its one epoch."""
    sources = {"a": (1, SourceOrder(8, 0, epochs=1, on_exhausted="renormalize")), "b": (0, SourceOrder(8, 0))}
    inner = Mixture(sources, schedule=((10, {"a": 1, "b": 1}),))
    outer = Mixture({"inner": (1, inner), "c": (1, SourceOrder(100, 0))})
    with pytest.raises(SamplerError, match="source 'inner' is a mixture that ends and has a schedule"):
        MixtureSampler(outer, global_batch_size=4)
    assert MixtureSampler(inner, global_batch_size=4).num_steps == 2


def test_a_step_too_far_for_a_mixture_is_refused(folder):
    config = mixture_config(folder)
    for source in config["corpus"]["mixture"].values():
        source["sampler"] = {"order": "sequential"}  # order "episode" has no seeds for so many epochs
    pipeline = load(config)
    last = (1 << 62) // pipeline.sampler.global_batch_size - 1
    assert len(pipeline.sampler.rows(last)) == pipeline.sampler.global_batch_size and pipeline[last]
    for step in (last + 1, 1 << 62, (1 << 63) - 2, 1 << 70):
        with pytest.raises(RowIndexError, match=f"step={step}: expected a step below {last + 1}"):
            pipeline[step]
        with pytest.raises(RowIndexError, match=f"step={step}: expected a step below {last + 1}"):
            pipeline.sampler.slots(range(step, step + 1))
    with pytest.raises(RowIndexError, match=r"A mixture counts its rows up to 2\^62"):
        next(pipeline.iter(start_step=1 << 62))


def test_a_mixture_of_sources_of_two_tokenizers_is_refused(folder):
    corpus = grain_sft.open_corpus(folder / "chat", eos_token_id=2)
    made_with = {name: dataclasses.replace(corpus, tokenizer=name, tokenizer_sha256=name * 64) for name in "ab"}

    def mixture(*corpora):
        sources = [NpyDataSource(WindowLayout(each, LENGTH)) for each in corpora]
        return MixtureSource({str(number): source for number, source in enumerate(sources)})

    with pytest.raises(CorpusError, match="no index of its own"):
        mixture(corpus, made_with["a"], made_with["a"]).layout.corpus.save(folder / "index.json")
    with pytest.raises(CorpusError, match="Prepare one of them again") as error:
        mixture(made_with["a"], corpus, made_with["b"])
    assert "a" * 64 in str(error.value) and "b" * 64 in str(error.value)
