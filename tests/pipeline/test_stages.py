"""Stages: each row where a naive reference has it, one run across their bounds, and accounts of what they read."""

import functools
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from batches import assert_one_run, assert_same, load
from sft_files import documents, write_episodes, write_olmo

import grain_sft
from grain_sft import Host
from grain_sft.cli.main import main
from grain_sft.errors import ConfigError, GrainSftError, PipelineError
from grain_sft.provenance import check_audit, checkpoint_table, difference, find_document, summarize, trace
from grain_sft.verify import verify
from grain_sft.view import view_rows

DOCS = documents(150, seed=3, longest=40)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    episodes = write_episodes(folder / "episodes", documents(120, 5, longest=40), shards=3)
    return {
        "olmo": {"path": str(write_olmo(folder / "olmo", DOCS, sources=True)), "eos_token_id": 2, "dtype": "uint16"},
        "episodes": {"path": str(episodes)},
    }


def numbered(folder, sizes):
    """Write shards whose tokens are numbered through all of them, and return the section `corpus`."""
    first, paths = 0, []
    for number, size in enumerate(sizes):
        paths.append(str(folder / f"{number}.npy"))
        np.arange(first, first + size, dtype="<u4").tofile(paths[-1])
        first += size
    return {"path": paths, "dtype": "uint32", "eos_token_id": 2**32 - 1}


def rows_by_hand(sizes, longest, plan, order, run_on):
    """Return the tokens of each step of a plan of (steps, length, rows), the number of tokens that it leaves out, and the
    number that it passes, by a walk through the stream of the longest rows."""
    rows, first = [], 0
    for size in sizes:
        rows += [first + at + np.arange(longest) for at in range(0, size - longest + 1, longest)]
        first += size
    rows = np.array(rows)
    epoch, at, left_out, steps = 0, 0, 0, []
    stream = rows[order(0, np.arange(len(rows)))].reshape(-1)
    for count, length, batch in plan:
        left_out += -at % length
        at += -at % length
        for _ in range(count):
            taken = np.zeros(0, np.int64)
            if not run_on and at + batch * length > len(stream):
                left_out, epoch, at = left_out + len(stream) - at, epoch + 1, 0
                stream = rows[order(epoch, np.arange(len(rows)))].reshape(-1)
            while len(taken) < batch * length:
                if at == len(stream):
                    epoch, at = epoch + 1, 0
                    stream = rows[order(epoch, np.arange(len(rows)))].reshape(-1)
                more = stream[at : at + batch * length - len(taken)]
                taken, at = np.append(taken, more), at + len(more)
            steps.append(taken.reshape(batch, length))
    return steps, left_out, epoch * stream.size + at


@pytest.mark.parametrize("seed", range(200))
def test_every_token_is_read_once_or_counted(tmp_path, seed):
    drawn = random.Random(seed)
    longest = drawn.choice([8, 12, 16, 24])
    lengths = [length for length in range(1, longest + 1) if longest % length == 0 and length >= 2]
    sizes = [drawn.randrange(0, 9) * longest + drawn.randrange(longest) for _ in range(3)] + [8 * longest]
    even, run_on, order = drawn.choice([1, 2]), drawn.random() < 0.5, drawn.choice(["shuffle", "olmo", "sequential"])
    plan = [
        (drawn.randrange(1, 12), drawn.choice(lengths), even * drawn.randrange(1, 7 // even))
        for _ in range(drawn.randrange(1, 6))
    ]
    plan.append((drawn.randrange(1, 6), longest, 2))
    stages = []
    for count, length, batch in plan:
        tokens = (count - 1) * length * batch + drawn.randrange(1, length * batch + 1)
        stages.append({"steps": count} if drawn.random() < 0.7 else {"tokens": tokens})
        stages[-1] |= {"layout": {"sequence_length": length}, "sampler": {"global_batch_size": batch}}
    sampler = {"seed": seed, "order": order, "last_batch": "run_on" if run_on else "drop"}
    config = {"corpus": numbered(tmp_path, sizes), "layout": {"kind": "windows"}, "sampler": sampler}
    longest_rows = grain_sft.load(
        {
            **config,
            "layout": {"kind": "windows", "sequence_length": longest},
            "sampler": {**sampler, "global_batch_size": 1},
        }
    )
    expected, left_out, passed = rows_by_hand(sizes, longest, plan, longest_rows.sampler.streams[0].rows_at, run_on)
    staged = grain_sft.load({**config, "stages": stages, "transforms": []})
    assert [(each.end_step - each.first_step) for each in staged.stages] == [count for count, _, _ in plan]
    assert len(staged) == len(expected)
    for step, rows in enumerate(expected):
        np.testing.assert_array_equal(staged[step]["tokens"], rows)
    delivered = sum(rows.size for rows in expected)
    assert delivered + left_out == passed
    assert sum(staged.gaps) <= left_out and (not run_on or sum(staged.gaps) == left_out)
    if not any(batch % 2 for _, _, batch in plan):
        split = [staged.replace(host=Host(host, 2)) for host in range(2)]
        for (step, rows), host in itertools.product(enumerate(expected), range(2)):
            np.testing.assert_array_equal(split[host][step]["tokens"], rows[host::2])


@pytest.fixture(scope="module")
def config(corpora):
    """A run that grows its windows, mixes in chats, goes on with packed chats, and ends as it began."""
    mixture = {"web": {**corpora["olmo"], "weight": 3}, "chat": {**corpora["episodes"], "weight": 1}}
    return {
        "corpus": corpora["olmo"],
        "layout": {"kind": "windows", "sequence_length": 16},
        "sampler": {"seed": 1, "global_batch_size": 4, "order": "olmo", "last_batch": "drop"},
        "stages": [
            {"steps": 5},
            {"steps": 6, "layout": {"sequence_length": 64}, "sampler": {"global_batch_size": 2}},
            {
                "tokens": 32 * 8 * 9,
                "corpus": {"mixture": mixture},
                "layout": {"sequence_length": 32},
                "sampler": {"global_batch_size": 8},
            },
            {"steps": 7, "corpus": corpora["episodes"], "layout": {"kind": "packed", "sequence_length": 64}},
            {"steps": 5, "transforms": ["ngram_filter", "shift_targets"]},
        ],
    }


FIRSTS = [0, 5, 11, 20, 27, 32]


def test_stages_are_one_run(config):
    pipeline = grain_sft.load(config, host=Host(0, 1))
    assert [each.first_step for each in pipeline.stages] + [len(pipeline)] == FIRSTS
    shapes = [pipeline[step]["inputs"].shape for step in range(len(pipeline))]
    assert [shape for shape, _ in itertools.groupby(shapes)] == [(4, 16), (2, 64), (8, 32), (4, 64), (4, 16)]
    assert_one_run(functools.partial(load, config), range(3, 32), [1, 2])
    for step in range(len(pipeline)):
        assert pipeline.at(step) is pipeline.stages[np.searchsorted(FIRSTS, step, side="right") - 1]
        assert_same(pipeline.at(step)[step], pipeline[step])


@pytest.mark.parametrize("stop", [1, 5, 10, 20, 31])
@pytest.mark.parametrize("worker_count", [0, pytest.param(2, marks=pytest.mark.heavy)])
def test_an_iterator_goes_on_in_its_stage(config, stop, worker_count):
    pipeline = grain_sft.load(config, host=Host(0, 1))
    iterator = pipeline.iter(worker_count=worker_count)
    for step in range(stop):
        assert_same(next(iterator), pipeline[step])
    state = iterator.get_state()
    iterator.close()
    again = grain_sft.load(config, host=Host(0, 1)).iter(worker_count=worker_count)
    again.set_state(state)
    for step in range(stop, len(pipeline)):
        assert_same(next(again), pipeline[step])
    with pytest.raises(StopIteration):
        next(again)


def test_a_stage_is_added_to_a_run_and_none_is_changed_behind_it(config):
    stages = config["stages"]
    alone = grain_sft.load({key: value for key, value in config.items() if key != "stages"}, host=Host(0, 1))
    run = alone.iter()
    for _ in range(5):
        next(run)
    mixed = {**stages[1], "layout": {"sequence_length": 16}}
    later = grain_sft.load({**config, "stages": [stages[0], mixed]}, host=Host(0, 1)).iter()
    later.set_state(run.get_state())
    assert later.next_step == 5
    longer = grain_sft.load({**config, "stages": stages[:2]}, host=Host(0, 1)).iter()
    with pytest.raises(PipelineError, match="max_target_sequence_length=64"):
        longer.set_state(run.get_state())
    next(later)
    changed = grain_sft.load({**config, "stages": [{"steps": 3}, mixed]}, host=Host(0, 1))
    with pytest.raises(PipelineError, match="the run continues at step 6, and later stage 1 differs before it"):
        changed.iter().set_state(later.get_state())
    before = grain_sft.load({**config, "stages": [stages[0], mixed]}, host=Host(0, 1)).receipt
    assert alone.receipt.differences(before.parts, before=5) == []
    assert [line.split(":")[0] for line in alone.receipt.differences(before.parts, before=6)][:1] == ["stage 2 differs"]


def test_rows_go_on_where_an_earlier_stage_of_the_same_stream_stopped(config, corpora):
    pipeline = grain_sft.load(config, host=Host(0, 1))
    whole = {
        **config,
        "layout": {"kind": "windows", "sequence_length": 64},
        "sampler": {**config["sampler"], "global_batch_size": 1},
    }
    longest = grain_sft.load({key: value for key, value in whole.items() if key != "stages"}, host=Host(0, 1))
    stream = np.concatenate([longest[step]["inputs"].reshape(-1) for step in range(3 * len(longest.source))])
    found = np.concatenate([pipeline[step]["inputs"].reshape(-1) for step in range(11)])
    assert pipeline.gaps[:2] == (0, 0)
    np.testing.assert_array_equal(found, stream[: len(found)])
    web = [
        pipeline[step]["inputs"][slots.source == 0]
        for step in range(11, 20)
        for slots in [pipeline.at(step).sampler.slots(range(step, step + 1))]
    ]
    mixed = np.concatenate(web).reshape(-1)
    np.testing.assert_array_equal(mixed, stream[len(found) : len(found) + len(mixed)])
    last = np.concatenate([pipeline[step]["inputs"].reshape(-1) for step in range(27, 32)])
    np.testing.assert_array_equal(last, stream[len(found) + len(mixed) :][: len(last)])


def test_weights_are_those_of_the_stages_that_have_the_sources(config):
    plain = grain_sft.load(config, host=Host(0, 1))
    reweighted = {**config, "amendments": [{"reweight": {"from": 14, "weights": {"chat": 9}}}]}
    heavier = grain_sft.load(reweighted, host=Host(0, 1))
    chats = [
        int((each.sampler.slots(range(14, 20)).source == 1).sum()) for each in (plain.stages[2], heavier.stages[2])
    ]
    assert chats[0] < 15 < chats[1]
    assert heavier.receipt.differences(plain.receipt.parts) == [
        "amendment 1 differs: here from step 14: reweight chat=9; there nothing."
    ]
    entries = [
        {"reweight": {"from": 14, "weights": weights}} for weights in ({"chat": 9}, {"web": 1}, {"chat": 9, "web": 1})
    ]
    one_by_one, at_once = (load({**config, "amendments": some}) for some in (entries[:2], entries[2:]))
    for step in range(11, 20):
        assert_same(one_by_one[step], at_once[step])
    with pytest.raises(GrainSftError, match="no stage from that step on is a mixture of these sources"):
        grain_sft.load({**config, "amendments": [{"reweight": {"from": 21, "weights": {"chat": 9}}}]}, host=Host(0, 1))


def test_a_document_is_withdrawn_from_every_stage_that_reads_it(config, tmp_path):
    """Stages number documents differently: 7 is one of the first stage's corpus, chat:3 is document 3 of the fourth's."""
    plain = load(config)
    (tmp_path / "gone.txt").write_text("7\nchat:3\n")
    gone = load({**config, "amendments": [{"withdraw": {"from": 4, "documents": str(tmp_path / "gone.txt")}}]})
    expected = [[7], [7], None, [3], [7]]
    first = plain.stages[2].source.layout.first_document
    expected[2] = sorted([first("web") + 7, first("chat") + 3])
    for stage, amended, numbers in zip(plain.stages, gone.stages, expected, strict=True):
        assert [each.withdraw.tolist() for each in amended.amendments] == [numbers]
        for step in range(max(4, stage.first_step), stage.end_step):
            lines = trace(amended, range(step, step + 1))
            if (lines.document >= 0).all():
                assert (np.isin(lines.document, numbers) == (lines.withdrawn > 0)).all()
    assert "stage 4: amendment 1" in gone.receipt.parts
    assert gone.receipt.differences(plain.receipt.parts, before=4) == []
    for name in ("nobody", "chat:120", "9" * 20):
        with pytest.raises(GrainSftError, match=f"{name}.*(is not a document number|expected 0 to)"):
            load({**config, "amendments": [{"withdraw": {"from": 4, "documents": [7, name]}}]})


def test_a_corpus_that_a_mixture_names_twice_has_documents_of_two_names(corpora):
    """The withdrawal of b:3 leaves a:3, in a stage with other names too."""
    mixtures = [{name: {**corpora["episodes"], "weight": 1} for name in names} for names in ("ab", "ba", "cd", "c")]
    layout, sampler = {"kind": "packed", "sequence_length": 32}, {"seed": 1, "global_batch_size": 4}
    stages = [{"steps": 40, "corpus": {"mixture": mixture}} for mixture in mixtures]
    config = {"layout": layout, "sampler": sampler, "stages": stages}
    gone = load({**config, "amendments": [{"withdraw": {"from": 0, "documents": ["b:3"]}}]})
    withdrawn = []
    for stage in gone.stages:
        lines = trace(gone, range(stage.first_step, stage.end_step), trainable=False)
        lines = lines.select(lines.withdrawn > 0)
        withdrawn.append({lines.source_names[source] for source in lines.source.tolist()})
    assert withdrawn == [{"b"}, {"b"}, {"d"}, set()]


def test_a_trace_names_what_each_stage_saw(config, capsys, tmp_path):
    pipeline = grain_sft.load(config, host=Host(0, 1))
    lines = trace(pipeline, range(32))
    for step in range(32):
        batch, mine = pipeline[step], lines.select(lines.step == step)
        assert int((batch["inputs_segmentation"] != 0).sum()) == int((mine.stop - mine.start).sum())
        assert int((batch["targets_segmentation"] != 0).sum()) == int(mine.trainable.sum()) or step >= 27
        [view] = view_rows(pipeline, step, [0])
        first = mine.select(mine.row == mine.row.min())
        shown = {-1 if piece.document is None else piece.document for piece in view.pieces}
        assert shown == set(first.document.tolist())
    assert summarize(lines)["tokens"] == summarize(iter([lines]))["tokens"]
    found = find_document(pipeline, [7])
    same = lines.select(np.isin(lines.step, found.step) & np.isin(lines.instance, found.instance))
    assert set(zip(found.step.tolist(), found.row.tolist(), strict=True)) <= set(
        zip(same.step.tolist(), same.row.tolist(), strict=True)
    )
    table = checkpoint_table(pipeline, 8)
    tokens = np.cumsum([pipeline[step]["inputs"].size for step in range(32)])
    assert table["tokens"] == [int(tokens[step - 1]) for step in table["step"]]


def test_an_audit_log_has_the_epochs_of_each_stage(config, tmp_path):
    audited = {**config, "audit": str(tmp_path / "run")}
    first = grain_sft.load(audited, host=Host(0, 1)).iter()
    for _ in range(12):
        next(first)
    first.close()
    list(grain_sft.load(audited, host=Host(0, 1)).iter(start_step=12))
    checked = check_audit(tmp_path / "run.log", grain_sft.load(config, host=Host(0, 1)))
    assert checked.accepted, checked.findings
    assert checked.loads == 2 and checked.resumes == 1
    text = (tmp_path / "run.jsonl").read_text()
    assert all(f'"stage": {number}' in text for number in range(1, 6))
    changed = text.replace('"stage": 3', '"stage": 4', 1)
    (tmp_path / "changed.jsonl").write_text(changed)
    assert not check_audit(tmp_path / "changed.jsonl", grain_sft.load(config, host=Host(0, 1))).accepted


def test_commands_take_stages(config, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    assert verify(str(path)).sound
    assert main(["inspect", str(path), "--step", "6", "--html", str(tmp_path / "page.html")]) == 0
    assert main(["trace", str(path), "--steps", "3:13", "--summary"]) == 0
    assert main(["receipt", str(path)]) == 0
    assert main(["bench", str(path), "--stage", "3", "--seconds", "0.2", "--repeats", "1", "--max-workers", "0"]) == 0
    capsys.readouterr()
    assert main(["bench", str(path), "--stage", "6"]) == 1
    assert "--stage 6: the config has 5" in capsys.readouterr().err
    shorter = {**config, "stages": [*config["stages"][:2], {**config["stages"][2], "tokens": 512}]}
    found = difference(grain_sft.load(config, host=Host(0, 1)), grain_sft.load(shorter, host=Host(0, 1)))
    assert found.first_step == 13


ERRORS = [
    ({"stages": [{"layout": {}}, {"steps": 1}]}, ConfigError, "stages[0]: expected `steps` or `tokens`"),
    ({"stages": [{"steps": 1, "tokens": 1}]}, ConfigError, "stages[0]: expected `steps` or `tokens`"),
    ({"stages": [{"step": 1}]}, ConfigError, "stages[0]: unknown key 'step'. The nearest known: 'steps'"),
    ({"stages": [{"steps": 1, "layout": {"kind": "window"}}]}, ConfigError, "stages[0]: layout.kind"),
    (
        {"stages": [{"steps": 1}, {"layout": {"sequence_length": 24}}]},
        GrainSftError,
        "sequence_length=16 does not divide",
    ),
    (
        {
            "sampler": {"global_batch_size": 4, "seed": 1, "schedule": [{"step": 3, "global_batch_size": 8}]},
            "stages": [{"steps": 4}],
        },
        ConfigError,
        "sampler.schedule beside stages",
    ),
    (
        {"sampler": {"global_batch_size": 4, "seed": 1, "epochs": 1}, "stages": [{"steps": 10**6}]},
        PipelineError,
        "stage 1 has 1000000 steps",
    ),
    ({"stages": [{"steps": 0}]}, ConfigError, "stages[0].steps"),
]


@pytest.mark.parametrize("changes, error, message", ERRORS, ids=[message for _, _, message in ERRORS])
def test_errors_name_the_stage(config, changes, error, message):
    with pytest.raises(error) as raised:
        grain_sft.load({**config, **changes}, host=Host(0, 1))
    assert message in str(raised.value)
    pipeline = grain_sft.load(config, host=Host(0, 1))
    with pytest.raises(
        PipelineError, match=r"source: each stage of a run has its own. Take pipeline.at\(step\).source"
    ):
        _ = pipeline.source


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "olmo_stages.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["chunks"], ids=lambda case: f"{case['L']}-of-{case['longest']}")
def test_parts_of_longer_rows_are_olmos(tmp_path, case):
    config = {
        "corpus": numbered(tmp_path, case["files"]),
        "layout": {"kind": "windows", "sequence_length": case["L"], "max_target_sequence_length": case["longest"]},
        "sampler": {"seed": case["seed"], "global_batch_size": case["rows"], "order": "olmo"},
        "transforms": [],
    }
    pipeline = grain_sft.load(config, host=Host(0, 1))
    expected = [first for epoch in case["epochs"] for first in epoch]
    assert [pipeline[step]["tokens"][:, 0].tolist() for step in range(len(expected))] == expected


@pytest.mark.parametrize("case", GOLDEN["runs"], ids=lambda case: f"{case['L']}-{len(case['steps'])}")
def test_warm_ups_of_length_and_batch_are_olmos(tmp_path, case):
    shapes = [(step["L"], len(step["first"])) for step in case["steps"]]
    stages = [
        {"steps": len(list(steps)), "layout": {"sequence_length": length}, "sampler": {"global_batch_size": rows}}
        for (length, rows), steps in itertools.groupby(shapes)
    ]
    stages.append({"steps": 1, "layout": {"sequence_length": case["L"]}, "sampler": {"global_batch_size": 1}})
    config = {
        "corpus": numbered(tmp_path, case["files"]),
        "layout": {"kind": "windows"},
        "sampler": {"seed": case["seed"], "order": "olmo"},
        "stages": stages,
        "transforms": [],
    }
    pipeline = grain_sft.load(config, host=Host(0, 1))
    for step, expected in enumerate(case["steps"]):
        assert pipeline[step]["tokens"].shape == (len(expected["first"]), expected["L"])
        assert pipeline[step]["tokens"][:, 0].tolist() == expected["first"]


def test_late_steps_are_found_without_those_before_them(corpora):
    stages = [{"steps": 10**6, "sampler": {"global_batch_size": 2 + number % 3}} for number in range(20)]
    skips = [{"skip": {"from": 9000 * number, "steps": 3}} for number in range(1, 1001)]
    config = {
        "corpus": corpora["olmo"],
        "layout": {"kind": "windows", "sequence_length": 16},
        "sampler": {"seed": 1, "global_batch_size": 2, "last_batch": "run_on"},
    }
    plain = grain_sft.load(config, host=Host(0, 1))
    stream, count = plain.sampler.streams[0].rows_at, len(plain.source)
    staged = grain_sft.load({**config, "stages": stages, "amendments": skips}, host=Host(0, 1))
    for step in (10**7 - 1, 10**7, 19 * 10**6):
        data = step + 3 * min(1000, step // 9000)
        sizes = [2 + number % 3 for number in range(data // 10**6 + 1)]
        first = sum(10**6 * size for size in sizes[:-1]) + data % 10**6 * sizes[-1]
        expected = [int(stream(row // count, np.array([row % count]))[0]) for row in range(first, first + sizes[-1])]
        assert staged.sampler.rows(step).tolist() == expected
