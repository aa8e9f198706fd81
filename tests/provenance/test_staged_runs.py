"""`check_audit` accepts the log of a run to which stages and amendments were added, and refuses those added too late.

Documents are numbered through all stages of a run, in traces, summaries, amendments and differences.
"""

import contextlib
import shutil

import numpy as np
import pytest
from audit_runs import ENDINGS
from batches import assert_same, load, sections, write_config

from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.provenance import check_audit, difference, find_document, summarize, trace


def run(config, steps, tmp_path, again=range(0)):
    """Deliver `steps` of a run with an audit log, then jump to `again` and deliver these steps. Return the pipeline."""
    pipeline = load({**config, "audit": str(tmp_path / "audit")})
    with contextlib.closing(pipeline.iter(start_step=steps.start)) as batches:
        for _ in steps:
            next(batches)
        if again:
            with contextlib.closing(pipeline.iter(start_step=again.start)) as other:
                batches.set_state(other.get_state())
        for _ in again:
            next(batches)
    return pipeline


def findings(tmp_path, pipeline):
    """Return the findings in both files of the log, as text."""
    return [str(each) for ending in ENDINGS for each in check_audit(tmp_path / f"audit{ending}", pipeline).findings]


@pytest.fixture
def config(corpora):
    return sections(None, 32, corpus=corpora["olmo"], layout="padded", order="shuffle", global_batch_size=15)


@pytest.mark.parametrize("last_batch", ["drop", "run_on"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_log_follows_the_stages_and_amendments_of_its_run(config, corpora, tmp_path, mixed, last_batch):
    if mixed:
        sources = {"a": {**corpora["olmo"], "weight": 2}, "b": {**corpora["episodes"], "weight": 1}}
        config["corpus"] = {"mixture": sources}
    else:
        config["sampler"]["last_batch"] = last_batch
    later = {"corpus": corpora["episodes"]}
    begin, last = [{"steps": 20}, {"steps": 11, **later}], {"steps": 9, "layout": {"sequence_length": 64}}
    amendments = [{"withdraw": {"from": 32, "documents": [3, 45]}}, {"skip": {"from": 50, "steps": 7}}]
    runs = [
        ({}, range(14)),
        ({"stages": [{"steps": 100}]}, range(14, 20)),
        ({"stages": [{"steps": 20}, {"steps": 100, **later}]}, range(20, 29)),
        ({"stages": [*begin, {}]}, range(29, 32)),
        ({"stages": [*begin, {}], "amendments": amendments[:1]}, range(32, 45)),
        ({"stages": [*begin, {}], "amendments": amendments}, range(45, 60)),
        ({"stages": [*begin, {"steps": 36}, last], "amendments": amendments}, range(60, 69)),
    ]
    for changes, steps in runs:
        whole = {**config, **changes}
        assert findings(tmp_path, run(whole, steps, tmp_path)) == [], steps
    wrong = ({**whole, "stages": [{"steps": steps}, *whole["stages"][1:]]} for steps in (14, 19, 21))
    assert all(findings(tmp_path, load(each)) for each in (*wrong, {**whole, "amendments": amendments[::-1]}))
    log = tmp_path / "audit.jsonl"
    for count, words in ((1, ("resume", "none")), (2, ('"stage": 3', '"stage": 4'))):  # each change causes one finding
        log.write_text(log.read_text().replace(*words, 1))
        assert len(found := findings(tmp_path, load(whole))) == count, found


@pytest.mark.parametrize("before", [[], [{"steps": 5}]])
def test_a_run_whose_last_stage_ended_inside_an_epoch_can_be_lengthened(config, tmp_path, before):
    config["amendments"] = [{"skip": {"from": 3, "steps": 2}}]
    for steps in (range(9), range(9, 22), range(22, 34)):  # two steps are skipped, an epoch has 10
        last = {"steps": steps.stop + 2 - sum(stage["steps"] for stage in before)}
        pipeline = run({**config, "stages": [*before, last]}, steps, tmp_path)
        assert pipeline.end_step == steps.stop
        assert findings(tmp_path, pipeline) == []
    assert findings(tmp_path, load({**config, "stages": [*before, {}]})) == []
    log = tmp_path / "audit.jsonl"
    [line] = [each for each in log.read_text().splitlines() if '"step": 21,' in each and "epoch_complete" in each]
    log.write_text(log.read_text().replace(line, line.replace('"rows_seen": ', '"rows_seen": 1')))
    assert any("rows_seen" in each for each in findings(tmp_path, pipeline))


PAST = {
    "with a stage that it did not have before: from step 6.": {"stages": [{"steps": 6}, {"layout": {"keep": "first"}}]},
    "with an amendment that it did not have before: from step 6: skip 1 steps": {
        "amendments": [{"skip": {"from": 6, "steps": 1}}]
    },
}


@pytest.mark.parametrize(("words", "changes"), PAST.items())
def test_a_stage_or_an_amendment_in_the_past_is_named(config, tmp_path, words, changes):
    run(config, range(9), tmp_path)
    pipeline = run({**config, **changes}, range(9, 12), tmp_path)
    assert any(f"the run continues at step 9 {words}" in each for each in findings(tmp_path, pipeline))


CHANGES = {
    "amendment": {"amendments": [{"withdraw": {"from": 6, "documents": [3, 5]}}]},
    "stage": {"stages": [{"steps": 6}, {"sampler": {"global_batch_size": 8}}]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_steps_that_were_delivered_without_a_stage_or_amendment_of_the_config_are_found(config, tmp_path, change):
    changed = {**config, **CHANGES[change]}
    run(config, range(25), tmp_path)
    first = findings(tmp_path, load(changed))[0]
    assert "were handed out without" in first and "of the config: from step 6" in first
    rolled_back = tmp_path / "rolled back"
    shutil.copytree(tmp_path, rolled_back)
    for steps, again in ((range(4, 40), range(30, 45)), (range(45, 60), range(0))):
        assert findings(rolled_back, run(changed, steps, rolled_back, again)) == []
    run(changed, range(4, 7), tmp_path)
    pipeline = run(changed, range(25, 40), tmp_path)
    assert any("no line states that steps" in each for each in findings(tmp_path, pipeline))


def test_a_stage_that_begins_earlier_because_of_a_skip_is_refused_after_that_step(config, corpora, tmp_path):
    config["amendments"] = [{"skip": {"from": 5, "steps": 3}}]
    pipeline = run({**config, "stages": [{}]}, range(19), tmp_path)
    with contextlib.closing(pipeline.iter(start_step=19)) as batches:
        state = batches.get_state()
    longer = load({**config, "stages": [{"steps": 20}, {"corpus": corpora["episodes"]}]})
    assert longer.stages[1].first_step == 17
    assert "handed out without a stage of the config: from step 17" in findings(tmp_path, longer)[0]
    with contextlib.closing(longer.iter()) as batches, pytest.raises(PipelineError, match="later stage"):
        batches.set_state(state)


def test_an_entry_of_an_epoch_that_is_skipped_is_refused(config, tmp_path):
    run(config, range(21), tmp_path)  # an epoch has 10 steps
    for ending in ENDINGS:  # without its first entry, a log is compared only with the run as it is now
        log = tmp_path / f"audit{ending}"
        log.write_bytes(log.read_bytes().split(b"\n", 1)[1])
    found = findings(tmp_path, load({**config, "amendments": [{"skip": {"from": 10, "steps": 10}}]}))
    assert "epoch_start of epoch 1; expected epoch_start of epoch 2 at step 10" in "\n".join(found)


def test_an_entry_that_completes_an_epoch_that_never_ends_is_refused(config, corpora, tmp_path):
    """A source whose weight becomes 0 leaves its epoch unfinished."""
    config["corpus"] = {"mixture": {"a": {**corpora["olmo"], "weight": 1}, "b": {**corpora["episodes"], "weight": 1}}}
    config["sampler"]["schedule"] = [{"step": 3, "weights": {"a": 0, "b": 1}}]
    pipeline = run(config, range(15), tmp_path)
    for ending, a, b in ((".log", "source=a", "source=b"), (".jsonl", '"source": "a"', '"source": "b"')):
        log = tmp_path / f"audit{ending}"
        line = next(line for line in log.read_text().splitlines() if "epoch_complete" in line)
        late = line.replace("epoch=0", f"epoch={9 * 10**17}").replace('"epoch": 0', f'"epoch": {9 * 10**17}')
        log.write_text("\n".join([log.read_text() + line.replace(b, a), late, ""]))
    assert any("action=epoch_complete of epoch 0; expected" in each for each in findings(tmp_path, pipeline))


@pytest.fixture
def several(corpora):
    """A config of three stages: "olmo", then "episodes", then a mixture of both as the sources "early" and "late"."""
    mixture = {"late": {**corpora["episodes"], "weight": 1}, "early": {**corpora["olmo"], "weight": 1}}
    last = {"corpus": {"mixture": mixture}, "sampler": {"schedule": [{"step": 3, "weights": {"late": 3}}]}}
    stages = [{"steps": 3}, {"steps": 3, "corpus": corpora["episodes"], "sampler": {"epochs": 2}}, last]
    return sections(None, 64, corpus=corpora["olmo"], order="shuffle") | {"stages": stages}


def test_a_run_numbers_the_documents_of_all_stages(several, tmp_path, run_command):
    pipeline, steps = load(several), range(12)
    lines = trace(pipeline, steps)
    first, second, third = (stage.source.layout for stage in pipeline.stages)
    begin, early = first.num_documents, third.first_document("early")
    seen = [set(), set()]  # documents of each corpus, by its own numbers
    for step in steps:
        stage = pipeline.at(step)
        own = stage.source.layout.pieces(stage.sampler.rows(step)).document
        mine, of_second = lines.document[lines.step == step], np.full(len(own), stage.source.layout is second)
        if stage.source.layout is third:
            of_second, own = own < early, np.where(own < early, own, own - early)
        assert mine.tolist() == (own + begin * of_second).tolist()
        for at in range(2):
            seen[at] |= set(own[of_second == at].tolist())
    assert sum(summarize(lines)["documents"]) == len(seen[0]) + len(seen[1])
    assert summarize(trace(pipeline, range(3)))["documents"][0] < len(seen[0])

    for number in np.unique(lines.document)[::7].tolist():
        found = find_document(pipeline, number, epochs=9)
        assert_same(found.select(found.step < 12).columns(), lines.select(lines.document == number).columns())
    number = int(lines.document[lines.step == 4][0])
    assert number >= begin
    found = find_document(pipeline, number, epochs=2)
    assert found.step[0] == 4 and found.step.max() >= 6 and (found.document == number).all()
    withdrawn = trace(load({**several, "amendments": [{"withdraw": {"from": 4, "documents": number}}]}), steps)
    assert ((withdrawn.withdrawn > 0) == ((withdrawn.document == number) & (withdrawn.step >= 4))).all()
    path = write_config(tmp_path / "run.json", several)
    command = ["trace", path, "--epochs", "2", "--format", "csv", "--document"]
    for name in (number, f"late:{number - begin}"):
        assert len(run_command(*command, name).out.splitlines()) == 2 + len(found)
    for name, why in (("web:0", "no such source; expected one of late, early"), ("9999", "no stage of the run has it")):
        assert why in run_command(*command, name, status=1).err
    with pytest.raises(RowIndexError, match="document 9999: no stage of the run has it"):
        find_document(pipeline, [number, 9999])


def test_documents_are_found_after_a_stage_whose_documents_have_unknown_ends(corpora, tmp_path, run_command):
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "web.npy")
    web = {"path": str(tmp_path / "web.npy"), "dtype": "uint16", "weight": 1, "layout": {"kind": "windows"}}
    late = {"corpus": {"mixture": {"chat": {**corpora["olmo"], "weight": 1}, "web": web}}}
    stated = sections(None, 64, corpus={key: web[key] for key in ("path", "dtype")}, order="shuffle")
    first = {"steps": 3, "layout": {"kind": "windows"}}
    config = write_config(tmp_path / "run.json", stated | {"stages": [first, late]})
    for name in ("chat:2", "502"):
        assert "seen 1 times" in run_command("trace", config, "--epochs", "1", "--document", name).out
    error = run_command("trace", config, "--document", "web:2", status=1).err
    assert "web.npy: no file states where documents end" in error


def test_a_difference_counts_documents_by_their_files(several):
    mixed = {key: value for key, value in several.items() if key != "stages"}
    mixed["corpus"] = several["stages"][2]["corpus"]
    steps = range(3)
    found = difference(load(several), load(mixed), steps=steps, count=3)
    seen = [set(), set()]
    for at, pipeline in enumerate((load(several), load(mixed))):
        layout = pipeline.at(0).source.layout
        for step in steps:
            own = layout.pieces(pipeline.sampler.rows(step)).document
            early = layout.first_document("early") if at else 0
            seen[at] |= {("early", number - early) if number >= early else ("late", number) for number in own.tolist()}
    assert found.documents == (len(seen[0] - seen[1]), len(seen[1] - seen[0]))


def test_documents_of_a_copied_corpus_are_those_of_the_original(corpora, tmp_path):
    own = corpora["olmo"]
    copy = own | {"path": str(shutil.copytree(own["path"], tmp_path / "olmo"))}
    base = sections(None, 64, corpus=own, order="shuffle")
    stages = [[{"steps": 3, "sampler": {"seed": 9}}, {"corpus": late, "sampler": {"seed": 8}}] for late in (own, copy)]
    one, other = (difference(load(base), load(base | {"stages": each}), steps=range(20), count=20) for each in stages)
    assert one.documents == other.documents and all(one.documents)
    assert difference(load(base), load(base | {"stages": [{}]})).first_step is None
