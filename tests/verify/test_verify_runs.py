"""`verify` finds faults of plans, configs, batches and materialized rows, and no fault in sound ones."""

import dataclasses
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from batches import load, sections, write_config
from damaged import LENGTH, VOCABULARY, assert_finds, check, poke, sentences, write, wrongs
from sft_files import EOS

import grain_sft
from grain_sft.errors import CorpusError
from grain_sft.layout import PackedLayout, PaddedLayout
from grain_sft.layout.plan import plan_columns
from grain_sft.layout.report import plan_files
from grain_sft.prepare.materialize import materialize
from grain_sft.sampling.orders import Order
from grain_sft.storage import artifact
from grain_sft.verify import Report, verify
from grain_sft.verify.check_pipeline import check_plan, wrong_in_batch

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def layout(tmp_path):
    return PackedLayout(grain_sft.open_corpus(write("olmo", tmp_path), eos_token_id=EOS), LENGTH)


def test_a_plan_is_refused_if_it_is_checked_with_another_corpus_or_is_damaged(tmp_path, layout):
    path = plan_files(layout)[0]["path"]
    assert verify(path).sound
    report = verify(path, corpus=tmp_path / "olmo", options={"eos_token_id": EOS})
    assert report.sound and report.figures["rows"] == len(layout) and report.figures["documents"] == 300
    report = verify(path, corpus=write("episodes", tmp_path), options={"eos_token_id": EOS})
    assert "is a plan of the documents content-sha256:" in sentences(report) and not report.sound
    assert wrongs(verify(path, corpus=tmp_path / "nothing"))[0][0] == "files"
    data = np.fromfile(path, np.uint8)
    poke(path, np.uint8, len(data) // 2, data[len(data) // 2] ^ 4)
    report = verify(path)
    assert wrongs(report) == [("files", Path(path).name, "")] and "not those that were written" in sentences(report)


def change_plan(layout, change, target=None) -> None:
    """Change the arrays of a plan and write it with a right checksum, as a packer with a bug would."""
    path = Path(plan_files(layout)[0]["path"])
    whole, depends = artifact.open_file(path)
    arrays = {name: np.array(array) for name, array in whole.items()}
    change(arrays)
    artifact.save(target or path, depends, arrays)


def _twice(arrays):
    """Make the last piece a part of the first one."""
    arrays["document"][-1], arrays["start"][-1] = arrays["document"][0], arrays["start"][0]
    arrays["length"][-1] = min(arrays["length"][0], arrays["length"][-1])


def _put(name, place, value):
    """Return a change of a plan: `value` at `place` of the array `name`."""
    return lambda arrays: arrays[name].__setitem__(place, value)


PLAN_FAULTS = {
    "a document twice": (_twice, r"token \d+: is in two pieces of document \d+, one in row \d+"),
    "a row that is too long": (_put("length", 0, LENGTH + 1), r"holds \d+ tokens, more than 64"),
    "a piece outside its document": (_put("start", 5, 1), "but document"),
    "a document that does not exist": (_put("document", 5, 300), "its documents are 0 to 300, but the corpus has 300"),
    "a document that only the plan's counts have": (
        lambda arrays: (_put("document", 5, 300)(arrays), _put("counts", 0, 400)(arrays)),
        "is of document 300, but there are 300 documents",
    ),
    "an empty piece": (_put("length", 3, 0), "piece 3, 0 tokens from"),
    "an empty row": (_put("ends", 0, 0), "ends at piece 0"),
    "pieces without a row": (lambda arrays: arrays["ends"].__setitem__(-1, arrays["ends"][-1] - 1), "ends at piece"),
    "counts that are wrong": (_put("counts", 3, 9), "states 9 cut documents"),
    "a column of another type": (lambda arrays: arrays.update(start=arrays["start"] + 0.0), "start is missing or not"),
    "a column that is missing": (lambda arrays: arrays.pop("document"), "its document is missing or not"),
    "columns of different lengths": (lambda arrays: arrays.update(start=arrays["start"][1:]), "different lengths"),
    "a count that is missing": (lambda arrays: arrays.update(counts=arrays["counts"][1:]), "it has 4 counts; expected"),
}
"""Changes of a plan's arrays, each with a pattern of the fault that `verify` then reports."""


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_each_fault_of_a_plan_is_found(tmp_path, layout, fault):
    change, sentence = PLAN_FAULTS[fault]
    change_plan(layout, change, tmp_path / "mine.arrays")
    report = verify(tmp_path / "mine.arrays", corpus=tmp_path / "olmo", options={"eos_token_id": EOS})
    assert not report.sound and re.search(sentence, sentences(report)), sentences(report)


def test_fragments_of_a_document_are_not_duplicates(tmp_path):
    corpus = grain_sft.open_corpus(write("olmo", tmp_path), eos_token_id=EOS)
    for options in ({"long_documents": "fragment"}, {"algorithm": "concat_then_split"}, {"algorithm": "multipack"}):
        layout = PackedLayout(corpus, 8, **options)
        assert verify(plan_files(layout)[0]["path"], corpus=tmp_path / "olmo", options={"eos_token_id": EOS}).sound
    pieces = layout.plans[0]
    arrays = plan_columns(corpus.documents, pieces.document, pieces.start, pieces.length, pieces.ends)
    report = Report("plan", "here", full=True)
    check_plan(report, "here", arrays, dataclasses.asdict(layout.packing) | {"max_segments": 1}, None)
    assert "max_segments is 1" in sentences(report)


@pytest.fixture
def config(tmp_path):
    stated = sections(write("olmo", tmp_path), LENGTH, corpus={"eos_token_id": EOS})

    def changed(transforms=("shift_targets",), **changes):
        own = {key: {**value, **changes.get(key, {})} for key, value in stated.items()}
        withdrawn = {"withdraw": {"from": 0, "documents": list(range(0, 300, 9))}}
        return write_config(tmp_path / "config.json", own | {"transforms": transforms, "amendments": [withdrawn]})

    return changed


@pytest.mark.parametrize("kind", ["windows", "padded", "packed"])
def test_a_sound_config_is_sound_and_a_full_check_counts_the_rows_of_its_first_epoch(config, kind):
    path = config(layout={"kind": kind})
    pipeline = load(path)
    for full in (False, True):
        report = assert_finds(path, [], full=full, receipt=pipeline.receipt.code)
    assert report.what == "config" and report.figures["receipt"] == pipeline.receipt.code
    assert report.figures["rows_of_first_epoch"] == len(pipeline.source) // 4 * 4
    assert_finds(path, [("receipt", "config.json", "")], pipeline.receipt.code, receipt="gs1-0123456789abcdef")
    assert_finds(config(sampler={"sed": 1}), [("files", "config.json", "")], "sed")


UNSTABLE = Order(lambda num_rows, **_: lambda epoch, indices: np.random.permutation(num_rows)[: len(indices)])


def test_rows_that_differ_between_calls_and_rows_of_another_document_are_found(config, monkeypatch):
    path = config(sampler={"order": f"{__name__}:UNSTABLE"})
    assert_finds(path, [("sampler", "config.json", "step 0")], "UNSTABLE returns row ")
    pieces = PaddedLayout.pieces
    for change, message in (
        (lambda own: {"length": np.minimum(own.length, 9 + len(own.row))}, "] in a call for 300 rows, but ["),
        (lambda own: {"document": (own.document + 1) % 300}, "is not inside its document. Fix the layout"),
    ):
        changed = lambda *each, change=change: pieces(*each)._replace(**change(pieces(*each)))  # noqa: E731
        monkeypatch.setattr(PaddedLayout, "pieces", changed)
        assert_finds(config(layout={"kind": "padded"}), [("layout", "config.json", "rows 0 to 299")], message)


def test_batches_whose_size_changes_with_the_step_and_batches_with_a_number_are_sound(config, monkeypatch):
    transforms = ["shift_targets", {"trim_to_multiple": {"multiple": 16}}]
    schedule = {"schedule": [{"step": 2, "global_batch_size": 8}]}
    assert check(config(transforms, layout={"kind": "padded"}, sampler=schedule)).sound
    monkeypatch.setattr("grain_sft.transforms.TrimToMultiple.map", lambda _, element: element | {"scale": 0.5})
    assert check(config(transforms)).sound


def test_all_sources_of_a_mixture_are_checked(tmp_path):
    def of(**sources):
        return write_config(tmp_path / "mixture.json", sections(None, LENGTH, corpus={"mixture": sources}))

    roots = {kind: write(kind, tmp_path) for kind in ("olmo", "primer")}
    names = {"olmo": "receipt", "primer": "documents"}  # a source may have the name of a figure
    mixture = {names[kind]: {"path": str(root), "eos_token_id": EOS, "weight": 1} for kind, root in roots.items()}
    path = of(**mixture)
    for full in (False, True):
        report = assert_finds(path, [], full=full)
        assert {report.figures[f"source {name}"]["documents"] for name in mixture} == {300}
        assert report.figures["documents"] == 600  # the plans of both sources together have 600 documents
    again = of(**mixture, again=mixture["receipt"] | {"eos_token_id": VOCABULARY})
    assert f"eos_token_id is {VOCABULARY}, but the vocabulary has" in sentences(check(again, full=False))
    poke(roots["primer"] / "train_labels.bin", np.int32, 2100, -100)
    poke(roots["primer"] / "train_input_ids.bin", np.uint16, 2100, 1000)
    assert ("vocabulary", "train_input_ids.bin", "token 2100") in wrongs(check(of(**mixture)))


def test_a_damaged_plan_in_the_cache_is_found_by_a_check_of_its_config(config):
    """The plan moves one piece by a token: all rows can be read, but one has tokens from outside of its document."""
    path = config()
    layout = load(path).source.layout
    change_plan(layout, lambda arrays: arrays["start"].__iadd__(np.arange(len(arrays["start"])) == 0))
    report = check(path)
    assert not report.sound and {"plan", "layout"} & {each.check for each in report.findings if each.wrong}


def test_a_wrong_value_in_a_batch_is_found(config):
    whole = load(config(layout={"kind": "padded"}))[0]
    for key, place, value, sentence in (
        ("targets", (0, 0), 7, "a target is not the token that follows: row 0"),
        ("inputs_position", (1, 0), 3, "does not begin at position 0: row 1"),
        ("inputs_position", (0, 1), 9, "is not 1 more than the position before it"),
        ("targets_segmentation", (2, 0), 9, "takes loss in another segment"),
        ("inputs", (0, 0), 5000, "holds the token 5000"),
    ):
        batch = {name: array.copy() for name, array in whole.items()}
        batch["targets_segmentation"][0, 0] = 1
        batch["row_number"] = np.arange(4)  # like a key that a transform of the user adds
        assert wrong_in_batch(batch, VOCABULARY) == ""
        batch[key][place] = value
        assert sentence in wrong_in_batch(batch, VOCABULARY)
    assert "{'inputs': 'float64'}" in wrong_in_batch(batch | {"inputs": batch["inputs"] / 2}, VOCABULARY)


@pytest.mark.parametrize("plane", [0, 1, 2], ids=["positions", "segments", "targets"])
def test_a_wrong_value_in_a_plane_of_materialized_rows_is_found(tmp_path, layout, plane):
    """A materialized row has its tokens first, and then three planes of one value for each token."""
    materialize(layout, tmp_path / "rows")
    assert check(tmp_path / "rows").sound
    path = tmp_path / "rows" / "rows_0000.bin"
    row = path.stat().st_size // len(layout)
    at = 40 * row + (layout.corpus.dtype.itemsize + plane) * LENGTH + 1
    assert 4096 < at < path.stat().st_size - 4096, "a change of the file's ends would change their hash"
    poke(path, np.uint8, at, 77)
    assert check(tmp_path / "rows", full=False).sound
    assert_finds(tmp_path / "rows", [("rows", "rows_0000.bin", "row 40")])


def test_exit_codes_and_json_state_the_result(tmp_path, config, run_command):
    root = write("primer", tmp_path)
    found = json.loads(run_command("verify", root, "--json").out)
    assert found["sound"] and found["figures"]["documents"] == 300
    poke(root / "train_idx.npy", np.uint8, 140, 9)
    found = json.loads(run_command("verify", root, "--json", status=1).out)
    (finding,) = (each for each in found["findings"] if each["wrong"])
    assert finding["where"].endswith("train_idx.npy") and finding["check"] == "boundaries"
    assert "no such file" in run_command("verify", tmp_path / "nothing", status=1).out.lower()
    run_command("verify", config(), "--vocab-size", "1000")
    for unused in (["--receipt", "gs2-0"], ["--host", "0/1"], ["--corpus", str(root)]):
        assert f"but {unused[0][2:]} applies to a" in run_command("verify", root, *unused, status=1).err
    error = run_command("verify", config(), "--no-use-loss-mask", "--eos-token-id", "0", status=1).err
    assert "Leave out eos_token_id, use_loss_mask" in error
    for wrong in (["--fast", "--full"], ["--vocab-size", "0"], ["--refuse-duplicates"], ["--as", "thing"], ["--what"]):
        run_command("verify", root, *wrong, status=2)


def test_a_corpus_a_config_and_a_plan_are_recognized_by_name_and_content(tmp_path, config):
    root = write("olmo", tmp_path)
    corpus = grain_sft.open_corpus(root, eos_token_id=EOS)
    corpus.save(tmp_path / "index.json")
    assert verify(tmp_path / "index.json").what == "corpus"
    assert verify(config()).what == "config"
    Path(plan_files(PackedLayout(corpus, LENGTH))[0]["path"]).rename(tmp_path / "plan")
    assert verify(tmp_path / "plan").what == "plan"
    (tmp_path / "mix.txt").write_text("a,olmo/token_ids_part_0000.npy\n")
    assert verify(tmp_path / "mix.txt", options={"dtype": "uint16"}).what == "corpus"
    (tmp_path / "odd.json").write_bytes(gzip.compress(b"{}"))
    assert not verify(tmp_path / "odd.json").sound
    with pytest.raises(CorpusError, match="expected one of corpus, plan, config"):
        verify(root, what="thing")
    with pytest.raises(CorpusError, match="is read as a plan, but vocab_size applies to a corpus"):
        verify(root, what="plan", vocab_size=5)
    assert "is in a bucket; expected a plan on a local disk" in sentences(verify("gs://bucket/x.arrays"))
