"""Amendments: nothing differs before their step, and after it exactly what they state, by a naive reference."""

import contextlib
import functools
import itertools
import json
import random

import numpy as np
import pytest
from batches import assert_one_run, assert_same, load
from sft_files import documents, write_episodes, write_olmo
from test_amendment_properties import without

import grain_sft
from grain_sft import Host
from grain_sft.cli.main import main
from grain_sft.errors import PipelineError
from grain_sft.integrations.checkpoint import RunRecord
from grain_sft.layout import documents_named_in
from grain_sft.pipeline import Amendment
from grain_sft.provenance import check_audit, difference, trace

DOCS = documents(150, seed=3, longest=40)
LAYOUTS = {
    "windows": {"kind": "windows"},
    "padded": {"kind": "padded"},
    "packed": {"kind": "packed"},
    "fragments": {"kind": "packed", "long_documents": "fragment"},
    "long": {"kind": "packed", "sequence_length": 2048},
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    weighted = documents(120, 5, weights=True, longest=40)
    return {
        "masks": {"path": str(write_olmo(folder / "olmo", DOCS, sources=True)), "eos_token_id": 2, "dtype": "uint16"},
        "weights": {"path": str(write_episodes(folder / "weights", weighted, shards=3))},
    }


def config_of(corpus, layout, amendments=(), transforms=("shift_targets",), **sampler):
    return {
        "corpus": corpus,
        "layout": {"sequence_length": 32, **LAYOUTS[layout]},
        "sampler": {"seed": 1, "global_batch_size": 4, "order": "olmo", **sampler},
        "transforms": list(transforms),
        "amendments": list(amendments),
    }


CORPORA = {"windows": "masks", "padded": "weights", "packed": "masks", "fragments": "weights", "long": "masks"}


@pytest.mark.parametrize(("layout", "corpus"), CORPORA.items())
def test_withdrawn_documents_are_padding_from_their_step_on(corpora, layout, corpus):
    drawn = random.Random(layout + corpus)
    numbers = drawn.sample(range(100), 24)
    first, later = sorted(numbers[:12]), sorted(numbers[12:])
    amendments = [{"withdraw": {"from": 6, "documents": later}}, {"withdraw": {"from": 2, "documents": first}}]
    filters = [{"ngram_filter": {"max_count": 12, "count_padding": True}}] if layout in ("windows", "padded") else []
    transforms = [*filters, "shift_targets"]  # such a filter fails the rows that have 12 tokens of padding in a run
    config = config_of(corpora[corpus], layout, transforms=transforms, last_batch="run_on")
    plain = grain_sft.load(config)
    changed = grain_sft.load({**config, "amendments": amendments})
    for step in range(9):
        gone = [] if step < 2 else first if step < 6 else numbers
        expected = without(plain.source, plain.sampler.rows(step), gone)
        assert_same(changed.source_at(step).read(plain.sampler.rows(step)), expected)
        for transform in plain.transforms:
            expected = transform.map(expected)
        batch = changed[step]
        assert_same(batch, expected)
        for array in batch.values():
            if array.flags.writeable:
                array.fill(7)  # a trainer may write to its batch, and no later one shows it
    assert_one_run(functools.partial(load, {**config, "amendments": amendments}), range(1, 8), [1, 2])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("layout", ["windows", "padded"])
def test_withdrawn_documents_that_overlap_in_any_order(tmp_path, monkeypatch, layout, exact):
    monkeypatch.setattr("grain_sft.source.withdrawn_documents._MOST_EXACT", 1 << 24 if exact else 1)
    write_episodes(tmp_path / "corpus", DOCS)
    [table] = (tmp_path / "corpus").rglob("episodes.idx")
    pairs = np.fromfile(table, np.uint64).reshape(-1, 2)[::-1].copy()
    if layout == "windows":
        pairs[3:60:4, 1] += pairs[2:59:4, 1] // 2 + 3  # into the next document
    pairs[70, 1] = 0
    pairs.tofile(table)
    numbers = [*random.Random(3).sample(range(len(pairs)), 30), 70]
    amendments = [{"withdraw": {"from": step, "documents": numbers[at::2]}} for at, step in enumerate([5, 2])]
    config = config_of({"path": str(tmp_path / "corpus")}, layout)
    plain, changed = grain_sft.load(config), grain_sft.load({**config, "amendments": amendments})
    for step in range(9):
        gone = [each for at, first in enumerate([5, 2]) for each in numbers[at::2] if step >= first]
        expected = without(plain.source, plain.sampler.rows(step), gone)
        assert_same(changed.source_at(step).read(plain.sampler.rows(step)), expected)
        assert_same(changed[step], plain.transforms[0].map(expected))
    if layout == "windows":
        lines = trace(changed, range(9), trainable=False)
        for step in range(9):
            of_step = lines.select(lines.step == step)
            seen = (of_step.stop - of_step.start - of_step.withdrawn).sum()
            assert seen == np.count_nonzero(changed[step]["inputs_segmentation"])


@pytest.mark.parametrize("seed", range(12))
def test_skipped_steps_are_never_read(corpora, seed):
    drawn = random.Random(seed)
    hosts = drawn.choice([1, 2, 4])
    sampler = {"global_batch_size": 4, "order": drawn.choice(["shuffle", "olmo", "maxtext", "episode", "sequential"])}
    sampler["epochs"] = drawn.choice([None, 2])
    if drawn.random() < 0.5:
        sampler["schedule"] = [{"step": drawn.randrange(1, 9), "global_batch_size": 8}]
    config = config_of(corpora["masks"], "packed", **sampler)
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
    slots, places = changed.sampler.slots(range(end)), {data: step for step, data in enumerate(left[:end])}
    every = plain.sampler.slots(range(left[end - 1] + 1))
    kept = np.isin(every.step, left[:end])
    assert slots.row.tolist() == every.row[kept].tolist()
    assert slots.step.tolist() == [places[step] for step in every.step[kept].tolist()]
    found = changed.sampler.find_slots(slots.row[:2], epochs=1)
    assert set(found.step.tolist()) == {
        int(step) for step in slots.step[np.isin(slots.row, slots.row[:2]) & (slots.epoch == 0)]
    }
    for epoch in range(2):
        read, span = slots.step[(slots.epoch == epoch) & (slots.row >= 0)], changed.sampler.streams[0].span(epoch)
        if span is not None and span.last < end:
            assert span.rows == len(read)
            assert not len(read) or (span.first, span.last) == (read[0], read[-1])


def test_a_run_goes_on_only_with_the_amendments_that_it_had(corpora, tmp_path):
    config = config_of(corpora["masks"], "packed")
    skip = {"skip": {"from": 5, "steps": 2}}
    plain, changed = grain_sft.load(config), grain_sft.load({**config, "amendments": [skip]})
    for step in (0, 5):
        for one, other in ((plain, changed), (changed, plain)):
            other.iter().set_state(one.iter(start_step=step).get_state())
    for one, other in ((plain, changed), (changed, plain)):
        with pytest.raises(
            PipelineError, match=r"continues at step 6, and amendment 1 differs.*from step 5: skip 2 steps"
        ):
            other.iter().set_state(one.iter(start_step=6).get_state())
    more = grain_sft.load({**config, "amendments": [skip, {"withdraw": {"from": 7, "documents": 3}}]})
    more.iter().set_state(changed.iter(start_step=7).get_state())
    assert len({each.receipt.code for each in (plain, changed, more)}) == 3
    record = RunRecord(str(tmp_path / "record.json"))
    for pipeline, step in ((plain, 0), (changed, 5), (more, 7)):
        record.begin(pipeline, step)
    for pipeline, step in ((plain, 8), (changed, 8)):
        with pytest.raises(PipelineError, match="differs: here nothing; there from step"):
            record.begin(pipeline, step)


def test_documents_are_named_by_record_input_and_file(corpora, tmp_path):
    layout = grain_sft.load(config_of(corpora["masks"], "padded")).source.layout
    (tmp_path / "gone.txt").write_text("4\n\n9\n")
    assert documents_named_in([layout], [3, "17", str(tmp_path / "gone.txt")])[0].tolist() == [3, 4, 9, 17]
    with pytest.raises(grain_sft.GrainSftError, match="'nobody' is not a document number, a source"):
        documents_named_in([layout], ["nobody"])


def test_a_config_file_names_documents_as_they_are_written(corpora, tmp_path):
    """2:17 is not 137, a source is not the folder of its name, and a list of documents is next to the config."""
    config = config_of({"mixture": {name: {**corpora["masks"], "weight": 1} for name in ("masks", "2")}}, "packed")
    (tmp_path / "masks").mkdir()
    (tmp_path / "gone.txt").write_text("masks")
    for written, meant in (("2:17", "2:17"), ("masks", "masks"), ("gone.txt", "masks")):
        gone = {"withdraw": {"from": 0, "documents": meant}}
        text = json.dumps({**config, "amendments": [gone]}).replace(
            f'"documents": "{meant}"', f'"documents": {written}'
        )
        (tmp_path / "run.yaml").write_text(text)
        assert grain_sft.load(tmp_path / "run.yaml").receipt == load({**config, "amendments": [gone]}).receipt


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"skp": {}}, r"amendments\[0\] is .*expected one of skip, withdraw, replace, reweight"),
        ({"skip": {"from": 3}}, r"amendments\[0\].skip lacks the key 'steps'"),
        ({"skip": {"from": -1, "steps": 2}}, r"amendments\[0\].skip.from"),
        ({"withdraw": {"from": 0, "documents": 10**6}}, "withdraw: document 1000000: expected 0 to 149"),
        ({"reweight": {"from": 3, "weights": {"a": 1}}}, "one corpus has no weights"),
    ],
)
def test_a_wrong_amendment_is_named(corpora, entry, message):
    with pytest.raises(grain_sft.GrainSftError, match=message):
        grain_sft.load(config_of(corpora["masks"], "packed", [entry]))


def test_an_amendment_that_changes_nothing_is_refused():
    with pytest.raises(PipelineError, match="changes nothing"):
        Amendment(4)


def test_a_trace_and_an_audit_log_show_what_each_step_saw(corpora, tmp_path):
    config = {**config_of(corpora["masks"], "windows"), "audit": str(tmp_path / "audit")}
    gone = list(range(20, 60))
    amendments = [{"skip": {"from": 9, "steps": 12}}, {"withdraw": {"from": 11, "documents": gone}}]
    changed = grain_sft.load({**config, "amendments": amendments})
    for pipeline, steps in ((grain_sft.load(config), range(7)), (changed, range(7, 30))):
        with contextlib.closing(pipeline.iter(start_step=steps.start)) as batches:
            for _ in steps:
                next(batches)
    for ending in ("log", "jsonl"):
        assert check_audit(tmp_path / f"audit.{ending}", changed).findings == []
        without = grain_sft.load({**config, "amendments": amendments[1:]})
        assert check_audit(tmp_path / f"audit.{ending}", without).findings
    lines = trace(changed, range(30))
    assert lines.withdrawn is not None and not lines.withdrawn[lines.step < 11].any() and lines.withdrawn.any()
    for step in range(30):
        batch, of_step = changed[step], lines.select(lines.step == step)
        seen = (of_step.stop - of_step.start - of_step.withdrawn).sum()
        assert seen == np.count_nonzero(batch["inputs_segmentation"])
        assert of_step.trainable.sum() == np.count_nonzero(batch["targets_segmentation"])
    assert "withdrawn" not in trace(grain_sft.load(config), range(3)).columns()


def test_an_audit_log_names_an_amendment_of_the_past(corpora, tmp_path):
    config = {**config_of(corpora["masks"], "padded"), "audit": str(tmp_path / "audit")}
    changed = grain_sft.load({**config, "amendments": [{"skip": {"from": 2, "steps": 1}}]})
    for pipeline, steps in ((grain_sft.load(config), range(4)), (changed, range(4, 8))):
        with contextlib.closing(pipeline.iter(start_step=steps.start)) as batches:
            for _ in steps:
                next(batches)
    found = [str(each) for each in check_audit(tmp_path / "audit.jsonl", changed).findings]
    assert any("an amendment that it did not have before: from step 2: skip 1 steps" in each for each in found)


def changes_of(drawn):
    """Return a random change of a config, which may change no batch at all."""
    sampler = drawn.choice([{}, {"seed": 2}, {"epochs": 1}, {"schedule": [{"step": 5, "global_batch_size": 8}]}])
    amendments = [{"skip": {"from": drawn.randrange(9), "steps": 2}}, {"withdraw": {"from": 3, "documents": [7, 8]}}]
    layout = drawn.choice([{}, {}, {"sequence_length": 24}, {"long_documents": "fragment"}])
    return {
        "sampler": sampler,
        "amendments": drawn.choice([[], amendments, amendments[:1], amendments[1:]]),
        "layout": layout,
    }


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(16, 50))])
def test_a_difference_begins_at_the_step_that_brute_force_finds(corpora, seed):
    drawn, config = random.Random(seed), config_of(corpora["masks"], "packed")
    pair = []
    for _ in range(2):
        change = changes_of(drawn)
        merged = {key: {**config[key], **change[key]} for key in ("sampler", "layout")}
        pair.append(grain_sft.load({**config, **merged, "amendments": change["amendments"]}))
    steps, first, differing = range(20), None, 0
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


def test_diff_prints_where_two_configs_part(corpora, tmp_path, capsys):
    config = config_of(corpora["masks"], "packed")
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, amendments in zip(paths, ([], [{"skip": {"from": 70, "steps": 3}}]), strict=True):
        path.write_text(json.dumps({**config, "amendments": amendments}))
    assert main(["diff", *map(str, paths)]) == 1
    printed = capsys.readouterr().out
    assert "amendment 1 differs: here nothing; there from step 70: skip 3 steps." in printed
    assert "step 70: the first that differs" in printed
    assert main(["diff", str(paths[0]), str(paths[0])]) == 0
    assert "the batches are equal" in capsys.readouterr().out
