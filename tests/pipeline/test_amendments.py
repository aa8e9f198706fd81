"""Amendments, such as skips of steps and withdrawals of documents, change batches from a step on."""

import itertools
import json
import random

import grain
import numpy as np
import pytest
from batches import assert_same, load, sections, write_config
from random_runs import without
from sft_files import documents, write_episodes

import grain_sft
from grain_sft import Host
from grain_sft.errors import PipelineError
from grain_sft.integrations.checkpoint import record_run
from grain_sft.pipeline import Amendment
from grain_sft.provenance import difference, trace


@pytest.fixture
def corpus(corpora):
    return corpora["olmo"]


def config_of(corpus, layout, amendments=(), **sampler):
    own = {"transforms": ["shift_targets"], "amendments": list(amendments)}
    return sections(None, 32, corpus=corpus, layout=layout, **sampler) | own


@pytest.mark.parametrize("layout", ["windows", "padded", "packed"])
def test_withdrawn_documents_may_overlap_and_be_in_any_order(tmp_path, layout):
    write_episodes(tmp_path / "corpus", documents(150, seed=3, longest=40))
    [table] = (tmp_path / "corpus").rglob("episodes.idx")
    pairs = np.fromfile(table, np.uint64).reshape(-1, 2)[::-1].copy()
    if layout == "windows":
        pairs[3:60:4, 1] += pairs[2:59:4, 1] // 2 + 3  # these documents reach into the next one
    pairs[70, 1] = 0
    pairs.tofile(table)
    numbers = [*random.Random(3).sample(range(len(pairs)), 30), 70]
    by_step = {5: numbers[::2], 2: numbers[1::2]}
    amendments = [{"withdraw": {"from": step, "documents": withdrawn}} for step, withdrawn in by_step.items()]
    config = config_of({"path": str(tmp_path / "corpus")}, layout)
    plain, changed = grain_sft.load(config), grain_sft.load({**config, "amendments": amendments})
    for step in range(9):
        gone = [number for first, withdrawn in by_step.items() if step >= first for number in withdrawn]
        expected = without(plain.source, plain.sampler.rows(step), gone)
        assert_same(changed.source_at(step).read(plain.sampler.rows(step)), expected)
        assert_same(changed[step], plain.transforms[0].map(expected))
    if layout == "windows":
        assert "withdrawn" not in trace(plain, range(3)).columns()
        lines = trace(changed, range(9), trainable=False)
        for step in range(9):
            of_step = lines.select(lines.step == step)
            seen = (of_step.stop - of_step.start - of_step.withdrawn).sum()
            assert seen == np.count_nonzero(changed[step]["inputs_segmentation"])


@pytest.mark.parametrize("seed", range(12))
def test_skipped_steps_are_never_read(corpus, seed):
    """Step k of the amended run is step `left[k]` of the plain run."""
    drawn = random.Random(seed)
    hosts = drawn.choice([1, 2, 4])
    sampler = {"global_batch_size": 4, "order": drawn.choice(["shuffle", "olmo", "maxtext", "episode", "sequential"])}
    sampler["epochs"] = drawn.choice([None, 2])
    if drawn.random() < 0.5:
        sampler["schedule"] = [{"step": drawn.randrange(1, 9), "global_batch_size": 8}]
    config = config_of(corpus, "packed", **sampler)
    skips = [(drawn.randrange(12), drawn.randrange(1, 5)) for _ in range(drawn.randrange(1, 4))]
    amended = {**config, "amendments": [{"skip": {"from": first, "steps": count}} for first, count in skips]}
    left = list(range(60))
    for first, count in sorted(skips):
        del left[first : first + count]
    host = Host(drawn.randrange(hosts), hosts)
    plain, changed = load(config, host), load(amended, host)
    left = [step for step in left if plain.num_steps is None or step < plain.num_steps]
    if plain.num_steps is not None:
        assert changed.num_steps == len(left)
    for step, data_step in enumerate(left[:16]):
        assert_same(changed[step], plain[data_step])
    end = min(len(left), 40)
    slots, plain_slots = changed.sampler.slots(range(end)), plain.sampler.slots(range(left[end - 1] + 1))
    kept = np.isin(plain_slots.step, left[:end])
    assert slots.row.tolist() == plain_slots.row[kept].tolist()
    assert [left[step] for step in slots.step] == plain_slots.step[kept].tolist()
    found = changed.sampler.find_slots(slots.row[:2], epochs=1)
    with_rows = np.isin(slots.row, slots.row[:2]) & (slots.epoch == 0)
    assert set(found.step.tolist()) == set(slots.step[with_rows].tolist())
    for epoch in range(2):
        read, span = slots.step[(slots.epoch == epoch) & (slots.row >= 0)], changed.sampler.streams[0].span(epoch)
        if span is not None and span.last < end:
            assert span.rows == len(read)
            assert not len(read) or (span.first, span.last) == (read[0], read[-1])


def test_a_run_resumes_only_with_the_amendments_of_its_past_steps(corpus, tmp_path):
    amendments = [{"skip": {"from": 5, "steps": 2}}, {"withdraw": {"from": 7, "documents": 3}}]
    plain, changed, more = (grain_sft.load(config_of(corpus, "packed", amendments[:count])) for count in range(3))
    message = r"continues at step 6, but amendment 1 differs.*from step 5: skip 2 steps"
    for one, other in ((plain, changed), (changed, plain)):
        for step in (0, 5):
            other.iter().set_state(one.iter(start_step=step).get_state())
        with pytest.raises(PipelineError, match=message):
            other.iter().set_state(one.iter(start_step=6).get_state())
    more.iter().set_state(changed.iter(start_step=7).get_state())
    grain.experimental.set_next_index(more.iter(), 9)
    with pytest.raises(PipelineError, match="amendment 1 differs"):
        changed.iter().set_state({**plain.iter(start_step=9).get_state(), "amendments": None})
    assert len({each.receipt.code for each in (plain, changed, more)}) == 3
    record = str(tmp_path / "record.json")
    for pipeline, step in ((plain, 0), (changed, 5), (more, 7)):
        record_run(record, pipeline, step)
    for pipeline in (plain, changed):
        with pytest.raises(PipelineError, match="differs: here nothing; there from step"):
            record_run(record, pipeline, 8)


def test_documents_in_a_yaml_file_are_read_as_text(corpora, tmp_path):
    """2:17 is document 17 of source 2, not YAML's number 137. The name of a source is not read as a path."""
    mixture = {name: {**corpora["olmo"], "weight": 1} for name in ("masks", "2", "web")}
    config = config_of({"mixture": mixture}, "packed")
    (tmp_path / "masks").mkdir()
    (tmp_path / "web").write_text("nobody")
    (tmp_path / "gone.txt").write_text("masks")
    for written, meant in (("2:17", "2:17"), ("masks", "masks"), ("gone.txt", "masks"), ("web", "web")):
        gone = {"withdraw": {"from": 0, "documents": meant}}
        text = json.dumps({**config, "amendments": [gone]})
        (tmp_path / "run.yaml").write_text(text.replace(f'"documents": "{meant}"', f'"documents": {written}'))
        assert grain_sft.load(tmp_path / "run.yaml").receipt == load({**config, "amendments": [gone]}).receipt


WRONG_AMENDMENTS = [
    ({"skp": {}}, r"amendments\[0\] is .*expected one of skip, withdraw, replace, reweight"),
    ({"skip": {"from": 3}}, r"amendments\[0\].skip lacks the key 'steps'"),
    ({"skip": {"from": -1, "steps": 2}}, r"amendments\[0\].skip.from"),
    ({"withdraw": {"from": 0, "documents": 10**6}}, "withdraw: document 1000000: expected 0 to 149"),
    ({"reweight": {"from": 3, "weights": {"a": 1}}}, "one corpus has no weights"),
]


@pytest.mark.parametrize(("entry", "message"), WRONG_AMENDMENTS)
def test_the_error_of_a_wrong_amendment_names_the_mistake(corpus, entry, message):
    with pytest.raises(grain_sft.GrainSftError, match=message):
        grain_sft.load(config_of(corpus, "packed", [entry]))


def test_an_amendment_that_has_wrong_types_or_changes_nothing_is_refused():
    for wrong in ({"withdraw": [[1], [2, 3]]}, {"reweight": ["a"]}, {"replace": 5}):
        with pytest.raises(grain_sft.GrainSftError, match=r"amendment.* [Ee]xpected"):
            Amendment(3, **wrong)
    with pytest.raises(PipelineError, match="changes nothing"):
        Amendment(4)


def test_amendments_may_be_given_as_an_iterator(corpus):
    """The receipt must not use up the iterator, or the amendments would change no batch."""
    plain = grain_sft.load(config_of(corpus, "packed"))
    amendments = [Amendment(2, skip=3), Amendment(2, withdraw=[4])]
    changed = grain_sft.Pipeline(plain.source, plain.sampler, plain.transforms, amendments=iter(amendments))
    assert np.array_equal(changed.sampler.rows(2), plain.sampler.rows(5)) and changed.withdrawals is not None


@pytest.mark.parametrize("documents", [[True, False], np.array([0, 1], bool), [1.7], ["3"], 5, {1.5}, [[1]], [1 << 64]])
def test_documents_that_are_not_integers_are_refused(documents):
    """A mask must not be read as integers: [True, False] would be the documents 1 and 0."""
    with pytest.raises(PipelineError, match=r"withdraw=.*expected a sequence of integers"):
        Amendment(4, withdraw=documents)


def changes_of(drawn):
    """Return random changes of a config. Some of them change no batch."""
    sampler = drawn.choice([{}, {"seed": 2}, {"epochs": 1}, {"schedule": [{"step": 5, "global_batch_size": 8}]}])
    amendments = [{"skip": {"from": drawn.randrange(9), "steps": 2}}, {"withdraw": {"from": 3, "documents": [7, 8]}}]
    layout = drawn.choice([{}, {}, {"sequence_length": 24}, {"long_documents": "fragment"}])
    chosen = drawn.choice([[], amendments, amendments[:1], amendments[1:]])
    return {"sampler": sampler, "amendments": chosen, "layout": layout}


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(16, 50))])
def test_difference_finds_the_first_step_and_the_rows_that_brute_force_finds(corpus, seed):
    drawn, config = random.Random(seed), config_of(corpus, "packed")
    pair = []
    for _ in range(2):
        change = changes_of(drawn)
        merged = {key: {**config[key], **change[key]} for key in ("sampler", "layout")}
        pair.append(grain_sft.load({**config, **merged, "amendments": change["amendments"]}))
    steps, first, differing = range(20), None, 0  # `differing` counts rows of the first 6 steps from `first` on
    for step in steps:
        batches = [each[step] if step < each.end_step else {} for each in pair]
        rows = [[*zip(*(array.tolist() for array in batch.values()), strict=True)] for batch in batches]
        unequal = sum(one != other for one, other in itertools.zip_longest(*rows))
        first = step if first is None and unequal else first
        differing += unequal if first is not None and step < first + 6 else 0
    found = difference(*pair, steps=steps, count=6)
    assert found.first_step == first
    if first is not None and first < 14:
        assert found.differing_rows == differing


def test_diff_prints_where_two_configs_differ(corpus, tmp_path, run_command):
    path = write_config(tmp_path / "a.json", config_of(corpus, "packed"))
    skipping = config_of(corpus, "packed", [{"skip": {"from": 70, "steps": 3}}])
    printed = run_command("diff", path, write_config(tmp_path / "b.json", skipping), status=1).out
    assert "amendment 1 differs: here nothing; there from step 70: skip 3 steps." in printed
    assert "step 70: the first that differs" in printed
    assert "the batches are equal" in run_command("diff", path, path).out
