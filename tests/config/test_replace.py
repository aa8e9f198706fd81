"""An amendment `replace` gives a source of a mixture another path, weight or repeat cap from a step on."""

import pickle
import random
from unittest import mock

import numpy as np
import pytest
from batches import assert_one_run, assert_same, error_of, load, sections, take, write_config
from sft_files import documents, write_olmo

from grain_sft import open_corpus
from grain_sft.errors import GrainSftError
from grain_sft.integrations import checkpoint
from grain_sft.provenance import check_audit, difference, trace

NAMES = ("a", "b", "c", "d", "e", "new")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return {name: str(write_olmo(folder / name, documents(60, seed))) for seed, name in enumerate(NAMES)}


def mixture_of(paths, **weights):
    own = {"layout": {"sequence_length": 48}}
    return {name: {"weight": weight, "path": paths[name], **own} for name, weight in weights.items()}


def config_of(paths, amendments=(), **sampler):
    corpus = {"mixture": mixture_of(paths, a=2, b=1), "eos_token_id": 2, "dtype": "uint16"}
    sampler = {"order": "shuffle", "seed": 4, "global_batch_size": 6, **sampler}
    return sections(None, 48, corpus=corpus, **sampler) | {"amendments": list(amendments)}


def streams_of(pipeline, steps):
    """Return the rows that `steps` read from each source, in order: (path of its first shard, number of the row)."""
    found = {}
    for step in steps:
        stage = pipeline.at(step)
        rows, layout = stage.sampler.rows(step), stage.source.layout
        for name, _, own in layout.split(rows):
            found.setdefault(name, []).extend((layout.parts[name].corpus.shards[0].path, row) for row in own.tolist())
    return found


@pytest.mark.parametrize("skipped", [0, 3])
def test_a_replaced_source_reads_other_files_from_a_step_on(paths, skipped):
    skip = [{"skip": {"from": 2, "steps": skipped}}] if skipped else []
    schedule = [{"step": 4, "global_batch_size": 12}, {"step": 15, "weights": {"a": 5}}]
    replace = {"replace": {"from": 9, "source": "b", "path": paths["new"]}}
    plain, changed = (load(config_of(paths, each, schedule=schedule)) for each in (skip, [*skip, replace]))
    for step in range(9):
        assert_same(plain[step], changed[step])
    assert difference(plain, changed).first_step == 9
    sizes = [len(changed.sampler.rows(step)) for step in range(30)]
    assert sizes == [len(plain.sampler.rows(step)) for step in range(30)]
    assert_one_run(lambda host: load(config_of(paths, [*skip, replace], schedule=schedule), host), range(6, 13), [1, 2])
    # the other source goes on where it stopped, also if the new files are its files
    replaced = ([*skip, {"replace": {"from": 9, "source": "a", "path": paths[name]}}] for name in ("new", "b"))
    one, other = (streams_of(load(config_of(paths, each)), range(30)) for each in replaced)
    assert one["b"] == other["b"]


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(5, 80))])
def test_random_replacements_read_each_file_in_its_order_and_change_nothing_else(paths, seed):
    """Also in stages and inner mixtures, a source reads the rows of a path in order, and goes on where it stopped."""
    drawn = random.Random(seed)
    inner = {"weight": 2, "mixture": mixture_of(paths, b=1, c=2)}
    config, names = config_of(paths), {"a": "a", "b": "b"}
    if drawn.random() < 0.5:
        if drawn.random() < 0.5:
            inner["schedule"] = [{"step": drawn.randint(1, 9), "weights": {"b": 4}}]
        config["corpus"]["mixture"] = {"a": config["corpus"]["mixture"]["a"], "in": inner}
        names = {"a": "a", "in/b": "b", "in/c": "c"}
    schedule = [{"step": 3, "global_batch_size": 12}, {"step": 8, "weights": {"a": 5}}]
    if drawn.random() < 0.5:
        first = {"steps": drawn.randint(1, 9), "sampler": {"schedule": schedule[:1]}}
        config["stages"] = [first, {"tokens": 48 * 60}, {"sampler": {"global_batch_size": 8}}]
        config["layout"]["sequence_length"] = 24
    elif drawn.random() < 0.5:
        config["sampler"]["schedule"] = schedule
    unused, replaced = ["new", "d", "e"], []
    for _ in range(drawn.randint(1, 3)):
        source = drawn.choice(list(names))
        keys = {"path": paths[unused.pop()]} if drawn.random() < 0.8 else {"weight": drawn.randint(1, 5)}
        replaced.append({"from": drawn.randrange(16), "source": source, **keys})
    plain, changed = (load({**config, "amendments": [{"replace": each} for each in some]}) for some in ([], replaced))
    for step in range(min(each["from"] for each in replaced)):
        assert_same(plain[step], changed[step])
    orders = {path: load(config_of({**paths, "a": path})).sampler.streams[0] for path in paths.values()}
    # the path that each source has, and how many rows of each path have been read
    current, read = {name: paths[own] for name, own in names.items()}, dict.fromkeys(paths.values(), 0)
    for step in range(24):
        current |= {each["source"]: each["path"] for each in replaced if each["from"] == step and "path" in each}
        assert len(changed.sampler.rows(step)) == len(plain.sampler.rows(step))
        for name, rows in streams_of(changed, [step]).items():
            order = orders[current[name]]
            places = read[current[name]] + np.arange(len(rows))
            epochs = zip(*np.divmod(places, order.source.num_instances), strict=True)
            expected = [int(order.rows_at(epoch, np.array([at]))[0]) for epoch, at in epochs]
            assert [row for _, row in rows] == expected and all(path.startswith(current[name]) for path, _ in rows)
            read[current[name]] += len(rows)
    # after a skip of 3 steps, each step has the batch that the run without the skip has 3 steps later
    first = drawn.randrange(12)
    skip = {"skip": {"from": first, "steps": 3}}
    earlier = [{"replace": {**each, "from": each["from"] - 3 * (each["from"] >= first + 3)}} for each in replaced]
    if not any(first <= each["from"] < first + 3 for each in replaced):
        skipped = load({**config, "amendments": [skip, *earlier]})
        for step in range(18):
            assert_same(skipped[step], changed[step + 3 * (step >= first)])


@pytest.mark.parametrize(("weights", "most_later"), [({"b": 1}, 60), ({"b": 1, "c": 1}, 132)])
def test_a_scheduled_weight_stays_after_a_replacement_and_ends_with_its_stage(paths, weights, most_later):
    """The replacement at step 4 keeps the weight 20 of b, which its stage schedules. The next stage has the amended weight.

    An amendment that also names c does not apply to the next stage, which has no source c.
    """
    # of two amendments with the same step, the later in the list counts
    reweights = [{"replace": {"from": 0, "source": "b", "weight": 20}}, {"reweight": {"from": 0, "weights": weights}}]
    replace = {"replace": {"from": 4, "source": "a", "path": paths["a"]}}
    schedule = [{"step": 2, "weights": {"b": 20}}]
    stages = [{"steps": 8, "corpus": {"mixture": mixture_of(paths, **weights)}, "sampler": {"schedule": schedule}}, {}]
    configs = [{**config_of(paths, each), "stages": stages} for each in (reweights, [*reweights, replace])]
    for steps, most in ((range(4, 8), 24), (range(8, 30), most_later)):
        plain, changed = (streams_of(load(config), steps) for config in configs)
        assert most - 18 < len(plain["b"]) < most
        assert len(changed["b"]) == pytest.approx(len(plain["b"]), abs=2)


def test_an_amended_weight_stays_if_the_schedule_repeats_the_weight_of_the_config(paths):
    for replaced in ([], [{"replace": {"from": 4, "source": "a", "path": paths["new"]}}]):
        amendments = [{"reweight": {"from": 0, "weights": {"b": 20}}}, *replaced]
        config = config_of(paths, amendments, schedule=[{"step": 2, "weights": {"b": 1}}])
        assert len(streams_of(load(config), range(4, 30))["b"]) == pytest.approx(26 * 6 * 20 / 22, abs=2)


def test_a_replacement_changes_the_weight_or_the_repeat_cap_of_a_source(paths):
    changes = {"replace": {"from": 5, "source": "b", "weight": 4}}, {"reweight": {"from": 5, "weights": {"b": 4}}}
    one, other = (load(config_of(paths, [change])) for change in changes)
    assert one.receipt == other.receipt and len(one.stages) == 1
    cap = {"from": 5, "source": "b", "max_epochs": 2, "on_exhausted": "renormalize", "weight": 4}
    capped = load(config_of(paths, [{"replace": cap}]))
    rows = [row for _, row in streams_of(capped, range(200))["b"]]
    assert np.bincount(rows).tolist() == [2] * len(capped.source_at(0).layout.parts["b"])


def test_the_error_of_an_exhausted_source_names_the_step_of_the_trainer(paths):
    cap = {"from": 5, "source": "b", "max_epochs": 1, "on_exhausted": "fail"}
    failing = load(config_of(paths, [{"skip": {"from": 3, "steps": 4}}, {"replace": cap}]))
    with pytest.raises(GrainSftError, match="source b has no row left") as error:
        for step in range(10**4):
            failing.sampler.rows(step)
    assert str(error.value).startswith(f"step {step}: ")
    with pytest.raises(GrainSftError, match=f"^step {step}: "):
        trace(pickle.loads(pickle.dumps(failing)), range(step + 1), trainable=False)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_the_audit_the_receipt_the_trace_and_checkpoints_record_the_replacement(paths, tmp_path):
    config = {**config_of(paths), "audit": str(tmp_path / "audit")}
    replace = {"from": 6, "source": "b", "path": "new"}
    (tmp_path / "new").symlink_to(paths["new"])
    path = write_config(tmp_path / "run.json", {**config, "amendments": [{"replace": replace}]})
    plain, changed = load(config), load(path)
    take(plain, 0, 6)
    take(changed, 6, 12)
    assert check_audit(tmp_path / "audit.jsonl", changed).findings == []
    assert check_audit(tmp_path / "audit.jsonl", plain).findings
    assert changed.receipt.parts["stage 2"].startswith("from step 6: ")
    lines = trace(changed, range(12))
    assert set(lines.document[lines.step < 6].tolist()).issubset(range(120))
    assert (lines.document[lines.step >= 6] >= 120).any()  # documents of the new files are numbered after all others
    assert checkpoint.resume_step(checkpoint.data_state(plain, 6), changed) == 6
    with pytest.raises(GrainSftError, match="from step 6"):
        checkpoint.resume_step(checkpoint.data_state(changed, 8), plain)


@pytest.mark.parametrize("listed", [False, True])
def test_a_wrong_replacement_is_refused(paths, listed, tmp_path):
    (tmp_path / "list.txt").write_text("b:17")
    named = str(tmp_path / "list.txt") if listed else "b:17"
    gone = {"withdraw": {"from": 2, "documents": [named]}}  # of the old or of the new files?
    for section, message in (
        ({"source": "b", "path": paths["new"]}, "withdraw 'b:17': stages read different files as 'b'"),
        ({"source": "b"}, "changes nothing. Give path, weight, max_epochs or on_exhausted"),
        ({"source": "c", "weight": 2}, "source 'c': expected one of a, b"),
        ({"source": "b", "file": "x"}, "file"),
    ):
        assert message in error_of(config_of(paths, [gone, {"replace": {"from": 3, **section}}])), section
    mixed = config_of(paths, [{"replace": {"from": 3, "source": "b", "weight": 2}}])
    corpus = {"path": paths["a"], "eos_token_id": 2, "dtype": "uint16"}
    for changed in ({"corpus": corpus}, {"stages": [{"steps": 3}, {"corpus": corpus}]}):
        assert "source 'b': no mixture is read from that step on" in error_of({**mixed, **changed})


def test_a_stage_is_divided_where_a_source_is_replaced(paths):
    """The stage may count tokens, or have a schedule of its sampler or of an inner mixture. Later stages keep the new files."""
    config, of_inner = config_of(paths), {"in": {"schedule": [{"step": 4, "weights": {"b": 3}}]}}
    inner = {"weight": 1, "mixture": {name: {"weight": 1, "path": paths[name]} for name in "ab"}}
    config["corpus"]["mixture"] = {"a": {"weight": 2, "path": paths["a"]}, "in": {**inner, **of_inner["in"]}}
    schedule = [{"step": 2, "global_batch_size": 12, "weights": {"a": 3}}, {"step": 9, "global_batch_size": 6}]
    stages = [
        {"steps": 5},
        {"tokens": 48 * (2 * 6 + 7 * 12 + 3 * 6) - 1, "sampler": {"schedule": schedule}},
        {"steps": 3, "corpus": {"path": paths["a"], "eos_token_id": 2, "dtype": "uint16"}},
        {"layout": {"sequence_length": 32}},
    ]
    amendments = [
        {"skip": {"from": 2, "steps": 3}},
        {"replace": {"from": 8, "source": "in/b", "path": paths["new"], "weight": 5}},
        {"replace": {"from": 1, "source": "a", "max_epochs": 9, "on_exhausted": "renormalize"}},
    ]
    with mock.patch("grain_sft.config.parts.open_corpus", side_effect=open_corpus) as opened:
        found = load({**config, "stages": stages, "amendments": amendments})
    assert opened.call_count == 3
    capped = {"a": {"max_epochs": 9, "on_exhausted": "renormalize"}}
    new = {"mixture": {"b": {"path": paths["new"], "weight": 5}}}
    config["corpus"]["mixture"]["in"] = inner
    by_hand = [
        {"steps": 1, "corpus": {"mixture": of_inner}},
        {"steps": 4, "corpus": {"mixture": {**capped, "in": {"schedule": [{"step": 3, "weights": {"b": 3}}]}}}},
        {"steps": 6, "corpus": {"mixture": {**capped, **of_inner}}, "sampler": {"schedule": schedule}},
        {
            "steps": 6,
            "corpus": {"mixture": {"a": {**capped["a"], "weight": 3}, "in": new}},
            "sampler": {"global_batch_size": 12, "schedule": [{"step": 3, "global_batch_size": 6}]},
        },
        {"steps": 3, "corpus": {"path": paths["a"], "eos_token_id": 2, "dtype": "uint16"}},
        {"layout": {"sequence_length": 32}, "corpus": {"mixture": {**capped, "in": {**of_inner["in"], **new}}}},
    ]
    expected = load({**config, "stages": by_hand, "amendments": amendments[:1]})
    assert [each.first_step for each in found.stages] == [each.first_step for each in expected.stages]
    for step in range(40):
        assert_same(found[step], expected[step])
    assert found.later_stages == expected.later_stages
    replaced = "from step 8: replace in/b (path, weight)", "from step 1: replace a (max_epochs, on_exhausted)"
    texts = [found.receipt.parts[f"amendment {number}"] for number in (1, 2, 3)]
    assert texts == ["from step 2: skip 3 steps", *replaced]
