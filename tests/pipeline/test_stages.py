"""Stages make one run. Each stage may have its own corpus, layout, batch size and transforms.

Batches, checkpoints, amendments, traces and commands work across the bounds of stages.
"""

import functools
import itertools

import numpy as np
import pytest
from batches import assert_one_run, assert_same, load, sections, write_config

from grain_sft import Host
from grain_sft.errors import ConfigError, GrainSftError, PipelineError, SamplerError
from grain_sft.provenance import checkpoint_table, difference, trace
from grain_sft.verify import verify
from grain_sft.view import view_rows


@pytest.fixture(scope="module")
def config(corpora):
    """A config of five stages: windows of 16 and 64 tokens, a mixture with chats, packed chats, windows of 16."""
    mixture = {"web": {**corpora["olmo"], "weight": 3}, "chat": {**corpora["episodes"], "weight": 1}}
    mixed = {"corpus": {"mixture": mixture}, "layout": {"sequence_length": 32}, "sampler": {"global_batch_size": 8}}
    stages = [
        {"steps": 5},
        {"steps": 6, "layout": {"sequence_length": 64}, "sampler": {"global_batch_size": 2}},
        {"tokens": 32 * 8 * 9, **mixed},
        {"steps": 7, "corpus": corpora["episodes"], "layout": {"kind": "packed", "sequence_length": 64}},
        {"steps": 5, "transforms": ["ngram_filter", "shift_targets"]},
    ]
    return sections(None, 16, corpus=corpora["olmo"], layout="windows", last_batch="drop") | {"stages": stages}


FIRSTS = [0, 5, 11, 20, 27, 32]  # the first step of each stage, and the end of the run


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_stages_are_one_run(config, workers):
    pipeline = load(config)
    assert [each.first_step for each in pipeline.stages] + [len(pipeline)] == FIRSTS
    shapes = [pipeline[step]["inputs"].shape for step in range(len(pipeline))]
    assert [shape for shape, _ in itertools.groupby(shapes)] == [(4, 16), (2, 64), (8, 32), (4, 64), (4, 16)]
    assert_one_run(functools.partial(load, config), range(3, 32), [1, 2], workers)
    assert len(list(pipeline.iter(start_step=3))) == 29
    for step in range(len(pipeline)):
        assert pipeline.at(step) is pipeline.stages[np.searchsorted(FIRSTS, step, side="right") - 1]
        assert_same(pipeline.at(step)[step], pipeline[step])


def test_hosts_that_do_not_divide_the_batches_of_a_later_stage_are_refused(config):
    with pytest.raises(SamplerError, match=r"stages\[1\]: global_batch_size=2 can't be divided by 4 hosts"):
        load(config, Host(0, 4))


def test_a_run_accepts_a_new_stage_but_no_change_of_a_stage_that_it_has_begun(config):
    stages = config["stages"]
    alone = load({key: value for key, value in config.items() if key != "stages"})
    run = alone.iter()
    list(itertools.islice(run, 5))
    second = {**stages[1], "layout": {"sequence_length": 16}}
    later = load({**config, "stages": [stages[0], second]}).iter()
    later.set_state(run.get_state())
    assert later.next_step == 5
    longer = load({**config, "stages": stages[:2]}).iter()
    with pytest.raises(PipelineError, match="max_target_sequence_length=64"):
        longer.set_state(run.get_state())
    next(later)
    changed = load({**config, "stages": [{"steps": 3}, second]})
    with pytest.raises(PipelineError, match="continues at step 6, but later stage 1 differs, and begins before"):
        changed.iter().set_state(later.get_state())
    skip = [{"skip": {"from": 5, "steps": 2}}]  # of the first stage or of the second: both runs begin the second at step 5
    one, other = (load({**config, "stages": [{"steps": steps}, stages[3]], "amendments": skip}) for steps in (5, 7))
    with pytest.raises(PipelineError, match=r"state: from step 5: Pipeline.* config: from step 5: data step 7: Pipeline"):
        other.iter().set_state(one.iter(start_step=6).get_state())
    before = load({**config, "stages": [stages[0], second]}).receipt
    assert alone.receipt.differences(before.parts, before=5) == []
    assert alone.receipt.differences(before.parts, before=6)[0].startswith("stage 2 differs:")


def test_rows_continue_where_an_earlier_stage_of_the_same_stream_stopped(config, corpora):
    pipeline = load(config)
    longest = load(sections(None, 64, corpus=corpora["olmo"], layout="windows", global_batch_size=1))
    stream = np.concatenate([longest[step]["inputs"].reshape(-1) for step in range(3 * len(longest.source))])
    found = np.concatenate([pipeline[step]["inputs"].reshape(-1) for step in range(11)])
    assert pipeline.gaps[:2] == (0, 0)
    np.testing.assert_array_equal(found, stream[: len(found)])
    slots = pipeline.at(11).sampler.slots(range(11, 20))
    web = [pipeline[step]["inputs"][slots.source[slots.step == step] == 0] for step in range(11, 20)]
    mixed = np.concatenate(web).reshape(-1)
    np.testing.assert_array_equal(mixed, stream[len(found) : len(found) + len(mixed)])
    last = np.concatenate([pipeline[step]["inputs"].reshape(-1) for step in range(27, 32)])
    np.testing.assert_array_equal(last, stream[len(found) + len(mixed) :][: len(last)])


def test_order_balanced_begins_a_stage_with_the_epoch_after_the_rows_that_an_epoch_drops(corpora):
    config = sections(None, 64, corpus=corpora["episodes"], layout="packed", global_batch_size=7, order="balanced")
    alone = load(config)
    steps = alone.sampler.steps_per_epoch
    assert len(alone.source) % 7
    assert_same(load(config | {"stages": [{"steps": steps}, {"steps": 2}]})[steps], alone[steps])


def test_a_reweight_changes_the_stages_that_mix_its_sources(config):
    plain = load(config)
    changes = [{"chat": 9}, {"web": 1}, {"chat": 9, "web": 1}]
    entries = [{"reweight": {"from": 14, "weights": weights}} for weights in changes]
    heavier = load({**config, "amendments": entries[:1]})
    few, many = ((each.stages[2].sampler.slots(range(14, 20)).source == 1).sum() for each in (plain, heavier))
    assert few < 15 < many
    (differs,) = heavier.receipt.differences(plain.receipt.parts)
    assert differs == "amendment 1 differs: here from step 14: reweight chat=9; there nothing."
    one_by_one, at_once = (load({**config, "amendments": some}) for some in (entries[:2], entries[2:]))
    for step in range(11, 20):
        assert_same(one_by_one[step], at_once[step])
    with pytest.raises(GrainSftError, match="no stage from that step on is a mixture of these sources"):
        load({**config, "amendments": [{"reweight": {"from": 21, "weights": {"chat": 9}}}]})


def test_a_document_is_withdrawn_from_every_stage_that_reads_it(config, tmp_path):
    """7 is a document of the first stage's corpus, and chat:3 one of the fourth's. The mixture has its own numbers."""
    plain = load(config)
    (tmp_path / "gone.txt").write_text("7\n\nchat:3\n")
    gone = load({**config, "amendments": [{"withdraw": {"from": 4, "documents": str(tmp_path / "gone.txt")}}]})
    first = plain.stages[2].source.layout.first_document
    expected = [[7], [7], sorted([first("web") + 7, first("chat") + 3]), [3], [7]]
    for stage, amended, numbers in zip(plain.stages, gone.stages, expected, strict=True):
        assert [each.withdraw.tolist() for each in amended.amendments] == [numbers]
        for step in range(max(4, stage.first_step), stage.end_step):
            lines = trace(amended, range(step, step + 1))
            if (lines.document >= 0).all():
                assert (np.isin(lines.document, numbers) == (lines.withdrawn > 0)).all()
    assert "stage 4: amendment 1" in gone.receipt.parts
    assert gone.receipt.differences(plain.receipt.parts, before=4) == []
    past, added = {"skip": {"from": 1, "steps": 1}}, {"withdraw": {"from": 4, "documents": "chat:3"}}
    before, after = (load({**config, "amendments": amendments}).receipt for amendments in ([past], [past, added]))
    assert after.differences(before.parts, before=4) == []  # the first stage does not read the document
    for name in ("nobody", "chat:120", "9" * 20):
        with pytest.raises(GrainSftError, match=f"{name}.*(is not a document number|expected 0 to|expected at most)"):
            load({**config, "amendments": [{"withdraw": {"from": 4, "documents": [7, name]}}]})


def test_a_document_of_a_corpus_that_a_mixture_names_twice_is_withdrawn_under_one_name(corpora):
    """The withdrawal of b:3 leaves a:3. In the stage that names these two sources c and d, it withdraws d:3."""
    mixtures = [{name: {**corpora["episodes"], "weight": 1} for name in names} for names in ("ab", "ba", "cd", "c")]
    stages = [{"steps": 40, "corpus": {"mixture": mixture}} for mixture in mixtures]
    amendments = [{"withdraw": {"from": 0, "documents": ["b:3"]}}]
    gone = load(sections(None, 32, order="shuffle") | {"stages": stages, "amendments": amendments})
    withdrawn = []
    for stage in gone.stages:
        lines = trace(gone, range(stage.first_step, stage.end_step), trainable=False)
        lines = lines.select(lines.withdrawn > 0)
        withdrawn.append({lines.source_names[source] for source in lines.source.tolist()})
    assert withdrawn == [{"b"}, {"b"}, {"d"}, set()]


def test_traces_views_and_checkpoint_tables_agree_with_each_stage(config):
    pipeline = load(config)
    lines = trace(pipeline, range(32))
    for step in range(32):
        mine = lines.select(lines.step == step)
        [view] = view_rows(pipeline, step, [0])
        first = mine.select(mine.row == mine.row.min())
        shown = {-1 if piece.document is None else piece.document for piece in view.pieces}
        assert shown == set(first.document.tolist())
    table = checkpoint_table(pipeline, 8)
    tokens = np.cumsum([pipeline[step]["inputs"].size for step in range(32)])
    assert table["tokens"] == [int(tokens[step - 1]) for step in table["step"]]


def test_commands_accept_stages(config, tmp_path, run_command):
    path = write_config(tmp_path / "run.json", config)
    assert verify(path).sound
    run_command("inspect", path, "--step", "6", "--html", tmp_path / "page.html")
    run_command("trace", path, "--steps", "3:13", "--summary")
    run_command("receipt", path)
    run_command("bench", path, "--stage", "3", "--seconds", "0.2", "--repeats", "1", "--max-workers", "0")
    assert "--stage 6: expected at most 5" in run_command("bench", path, "--stage", "6", status=1).err
    shorter = {**config, "stages": [*config["stages"][:2], {**config["stages"][2], "tokens": 512}]}
    assert difference(load(config), load(shorter)).first_step == 13


SAMPLER, SCHEDULE = {"global_batch_size": 4, "seed": 1}, {"schedule": [{"step": 3, "global_batch_size": 8}]}
ERRORS = [
    ({"stages": [{"layout": {}}, {"steps": 1}]}, ConfigError, "stages[0]: expected `steps` or `tokens`"),
    ({"stages": [{"steps": 1, "tokens": 1}]}, ConfigError, "stages[0]: expected `steps` or `tokens`"),
    ({"stages": [{"steps": 1, "layout": {"kind": "window"}}]}, ConfigError, "stages[0]: layout.kind"),
    ({"stages": [{"steps": 1}, {"layout": {"sequence_length": 24}}]}, GrainSftError, "length=24. Give a length"),
    ({"sampler": SAMPLER | SCHEDULE, "stages": [{"steps": 4}]}, ConfigError, "sampler.schedule with stages"),
    ({"sampler": SAMPLER | {"epochs": 1}, "stages": [{"steps": 10**6}]}, PipelineError, "stage 1 has 1000000 steps"),
    ({"stages": [{"steps": 0}]}, ConfigError, "stages[0].steps"),
]


@pytest.mark.parametrize("changes, error, message", ERRORS, ids=[message for _, _, message in ERRORS])
def test_errors_name_the_stage(config, changes, error, message):
    with pytest.raises(error) as raised:
        load({**config, **changes})
    assert message in str(raised.value)


def test_a_step_or_source_that_a_run_of_stages_does_not_have_is_refused(config):
    pipeline = load(config)
    for read in (pipeline.__getitem__, lambda step: pipeline.read(step, np.arange(1))):
        with pytest.raises(GrainSftError, match="step=99999999: expected 0 to 31"):
            read(99999999)
    with pytest.raises(PipelineError, match=r"each stage of a run has its own. Take pipeline.at\(step\).source"):
        _ = pipeline.source
