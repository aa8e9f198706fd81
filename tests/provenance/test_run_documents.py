"""Documents are numbered through all stages of a run, in traces, summaries, amendments and differences."""

import shutil

import numpy as np
import pytest
from batches import assert_same, load, sections, write_config

from grain_sft.errors import RowIndexError
from grain_sft.provenance import difference, find_document, summarize, trace


@pytest.fixture
def several(corpora):
    """A config of three stages: "olmo", then "episodes", then a mixture of both as the sources "early" and "late"."""
    mixture = {"late": {**corpora["episodes"], "weight": 1}, "early": {**corpora["olmo"], "weight": 1}}
    last = {"corpus": {"mixture": mixture}, "sampler": {"schedule": [{"step": 3, "weights": {"late": 3}}]}}
    stages = [{"steps": 3}, {"steps": 3, "corpus": corpora["episodes"]}, last]
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
