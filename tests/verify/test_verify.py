"""What is damaged is found, with its file and its place; what is sound is called sound."""

import dataclasses
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from batches import sections
from sft_files import EOS, documents, write_episodes, write_olmo, write_openchat, write_primer

import grain_sft
from grain_sft.cli.main import main
from grain_sft.errors import CorpusError
from grain_sft.layout import PackedLayout
from grain_sft.layout.plan import plan_columns
from grain_sft.layout.report import plan_files
from grain_sft.prepare.materialize import materialize
from grain_sft.sampling import Host
from grain_sft.storage import artifact
from grain_sft.verify import Report, content, verify
from grain_sft.verify.check_pipeline import check_plan, wrong_in_batch
from grain_sft.verify.content import find_duplicates, scan_documents

pytestmark = pytest.mark.usefixtures("own_cache")

VOCABULARY = 1000
LENGTH = 64


def write(kind: str, root: Path, count: int = 300, **options) -> Path:
    """A corpus of a format."""
    docs = documents(count, weights=kind in ("episodes", "openchat"))
    writers = {"olmo": write_olmo, "episodes": write_episodes, "primer": write_primer, "openchat": write_openchat}
    own = {"olmo": {"part_tokens": max(2000, 8 * count), "sources": True}, "episodes": {"shards": 2}}
    return writers[kind](root / kind, docs, **own.get(kind, {}), **options)


def check(where, *, full=True, vocab_size=VOCABULARY, **options) -> Report:
    return verify(where, full=full, vocab_size=vocab_size, options={"eos_token_id": EOS}, **options)


def wrongs(report: Report) -> list[tuple[str, str, str]]:
    """(check, name of the file, place) of what is wrong."""
    return [(each.check, Path(each.where).name, each.place) for each in report.findings if each.wrong]


def sentences(report: Report) -> str:
    """What is wrong, a line each."""
    return "\n".join(str(each) for each in report.findings if each.wrong)


def write_train(root: Path, tokens, mask, pairs) -> Path:
    """A corpus of episodes in one shard."""
    (root / "train").mkdir(parents=True)
    for name, dtype, values in (
        ("tokens.bin", "<u2", tokens),
        ("mask.bin", "u1", mask),
        ("episodes.idx", "<u8", pairs),
    ):
        np.asarray(values, dtype).tofile(root / "train" / name)
    return root


def poke(path: Path, dtype, place: int, value) -> None:
    array = np.fromfile(path, dtype)
    array[place] = value
    array.tofile(path)


@pytest.mark.parametrize("full", [False, True], ids=["fast", "full"])
@pytest.mark.parametrize("kind", ["olmo", "episodes", "primer", "openchat"])
def test_a_sound_corpus_is_sound(tmp_path, kind, full):
    report = check(write(kind, tmp_path), full=full)
    assert report.sound, sentences(report)
    assert report.figures["documents"] == 300
    assert ("duplicate_documents" in report.figures) == full


def test_a_folder_of_two_splits_says_which_was_checked(tmp_path):
    for split in ("train", "val"):
        write_olmo(tmp_path / "sft" / split, documents(20))
    (finding,) = (each for each in check(tmp_path / "sft").findings if "training split" in each.message)
    assert not finding.wrong and finding.message.endswith(f"grain-sft verify {tmp_path / 'sft' / 'val'}")
    assert not any("split" in each.message for each in check(tmp_path / "sft" / "train").findings)


@pytest.mark.parametrize(
    ("kind", "path", "dtype", "value", "expected"),
    [
        ("olmo", "token_ids_part_0001.npy", np.uint16, 1000, "is 1000, but the vocabulary has 1000 ids"),
        ("episodes", "train/shard_00001/tokens.bin", np.uint32, 1000, "is 1000, but the vocabulary has 1000 ids"),
        ("primer", "train_input_ids.bin", np.uint16, 1000, "is 1000, but the vocabulary has 1000 ids"),
        ("olmo", "labels_mask_part_0001.npy", np.uint8, 2, "holds 2; expected 0 or 1"),
        ("episodes", "train/shard_00001/mask_weighted.bin", np.float32, np.nan, "expected a finite weight"),
        ("episodes", "train/shard_00001/mask_weighted.bin", np.float32, -0.5, "-0.5; expected a finite weight, 0 or"),
        ("primer", "train_labels.bin", np.int32, 5, "holds 5; expected the token itself or -100, not shifted"),
    ],
)
def test_an_id_or_a_loss_that_cannot_be_is_found_far_from_the_ends(tmp_path, kind, path, dtype, value, expected):
    root = write(kind, tmp_path, 1500)
    place = np.fromfile(root / path, dtype).size // 2
    poke(root / path, dtype, place, value)
    if path == "train_input_ids.bin":
        poke(root / "train_labels.bin", np.int32, place, -100)
    assert check(root, full=False).sound or kind == "episodes"  # some of its documents are read, and with them this
    report = check(root)
    name = "vocabulary" if value == 1000 else "loss"
    assert wrongs(report)[0] == (name, Path(path).name, f"token {place}")
    assert expected in sentences(report)
    if value == 1000:
        assert report.figures["highest_token"] == 1000 and check(root, vocab_size=1001).sound


@pytest.mark.parametrize("full", [False, True], ids=["fast", "full"])
def test_boundaries_that_are_shifted_or_of_other_tokens_are_found(tmp_path, full):
    root = write("episodes", tmp_path, gap=1)
    path, other = (root / "train" / f"shard_0000{number}" / "episodes.idx" for number in range(2))
    whole = np.fromfile(path, np.uint64)
    for index in (path, other):
        poke(index, np.uint64, slice(0, None, 2), np.fromfile(index, np.uint64)[::2] - np.uint64(1))
    report = check(root, full=full)
    assert [each[0] for each in wrongs(report)] == ["boundaries"]
    assert "don't end with the EOS token 2" in sentences(report)
    whole[-1] += np.uint64(1)
    whole.tofile(path)
    report = check(root, full=full)
    assert wrongs(report)[0][:2] == ("boundaries", "episodes.idx")
    assert "tokens from token" in sentences(report), report.findings


def test_documents_that_begin_with_the_eos_of_the_one_before_are_said_to_be_shifted(tmp_path):
    pairs = [(0, 3), *((4 * number - 1, 4) for number in range(1, 50))]
    report = check(write_train(tmp_path / "shifted", [5, 6, 7, EOS] * 50, np.ones(200), pairs))
    assert wrongs(report) == [("boundaries", "episodes.idx", "document 1")]
    assert "The boundaries are shifted by a token" in sentences(report)


def test_a_gzip_file_whose_checksum_is_wrong_is_found(tmp_path):
    root = write("olmo", tmp_path)
    path = root / "token_ids_part_0001.csv.gz"
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # of the CRC
    path.write_bytes(data)
    for full in (False, True):
        report = check(root, full=full)
        assert wrongs(report) == [("boundaries", path.name, "")], report.findings


@pytest.mark.parametrize("change", ["replaced", "shortened", "gone", "grown"])
def test_files_that_are_not_what_an_index_says_are_all_named(tmp_path, change):
    root = write("olmo", tmp_path)
    grain_sft.open_corpus(root, eos_token_id=EOS).save(tmp_path / "index.json")
    assert check(tmp_path / "index.json", full=False).sound
    paths = [root / "token_ids_part_0000.npy", root / "labels_mask_part_0001.npy"]
    for path in paths:
        data = path.read_bytes()
        path.unlink()
        changed = {"replaced": bytes([data[0] ^ 1]) + data[1:], "shortened": data[:-2], "grown": data + b"ab"}
        if change in changed:
            path.write_bytes(changed[change])
    report = check(tmp_path / "index.json", full=False)
    assert not report.sound
    if change == "replaced":  # the others are found when the index is opened, which stops at the first
        assert {name for _, name, _ in wrongs(report)} == {path.name for path in paths}
    assert paths[0].name in sentences(report) or paths[1].name in sentences(report)


def test_statistics_of_other_documents_and_sources_of_other_inputs_are_found(tmp_path):
    root = write("olmo", tmp_path)
    tokens = sum(len(each) for each, _ in documents(300))
    manifest = {
        "tokenizer": {"vocab_size": VOCABULARY, "eos_token_id": EOS},
        "inputs": [{"path": name} for name in "abc"],
        "splits": {"train": {"documents": 300, "tokens": tokens, "trainable_tokens": 7}, "val": {"documents": 9}},
    }
    (root / "prepare.json").write_text(json.dumps(manifest))
    assert verify(root).sound
    report = verify(root, full=True)
    assert wrongs(report) == [("statistics", "prepare.json", "")]
    assert "7 trainable_tokens" in sentences(report)
    manifest["splits"]["train"].pop("trainable_tokens")
    manifest["inputs"].pop()
    (root / "prepare.json").write_text(json.dumps(manifest))
    report = verify(root, full=True)
    assert wrongs(report)[0] == ("boundaries", "sources.bin", "document 2")
    assert report.left_out == {"boundaries": 80}  # 100 are wrong, and 20 are listed


def test_a_tokenizer_that_is_another_is_found(tmp_path):
    from grain_sft.prepare import train_tokenizer

    root = write("episodes", tmp_path)
    (root / "tokenizer").mkdir()
    model = train_tokenizer([f"word {number} and more" for number in range(200)], 400, [])
    (root / "tokenizer" / "tokenizer.model").write_bytes(model)
    report = verify(root)
    assert wrongs(report) == [("vocabulary", "tokenizer", "")]
    assert "is another tokenizer" in sentences(report)


def test_duplicates_are_counted_and_refused_where_that_is_asked_for(tmp_path, capsys):
    docs = documents(300)
    docs += [docs[7], docs[9], docs[7]]
    root = write_olmo(tmp_path / "olmo", docs, part_tokens=1000)
    report = check(root)
    assert report.sound
    assert report.figures["duplicate_documents"] == 3
    assert report.figures["duplicate_tokens"] == 2 * len(docs[7][0]) + len(docs[9][0])
    arguments = ["verify", str(root), "--full", "--eos-token-id", str(EOS), "--vocab-size", "1000"]
    assert main(arguments) == 0
    assert "3 documents" in capsys.readouterr().out
    assert main([*arguments, "--refuse-duplicates"]) == 1
    assert "documents 7 and 300" in capsys.readouterr().out


@pytest.mark.parametrize("block", [1, 5, 64, 1 << 20])
def test_hashes_are_equal_exactly_where_tokens_are(tmp_path, monkeypatch, block):
    """Documents that overlap, stand in any order, are empty, or longer than a block; against sets of their bytes."""
    monkeypatch.setattr(content, "BLOCK_TOKENS", block)
    random = np.random.default_rng(block)
    tokens, mask = random.integers(0, 3, 600), random.integers(0, 2, 600)
    starts = random.integers(0, 590, 250)
    pairs = np.stack([starts, np.minimum(random.choice([0, 1, 2, 3, 5, 200], 250), 600 - starts)], 1)
    corpus = grain_sft.open_corpus(write_train(tmp_path, tokens, mask, pairs), dtype="uint16")
    seen = []
    scanned = scan_documents(corpus, lambda begin, some: seen.extend(some.tolist()))
    assert seen == tokens.tolist()
    groups, hashes = {}, set()
    for number, (start, length) in enumerate(pairs.tolist()):
        here = slice(start, start + length)
        if length:
            groups.setdefault(tokens[here].tobytes(), []).append(number)
            hashes.add((tokens[here].tobytes(), int(scanned.hash[number])))
            assert (scanned.first[number], scanned.last[number]) == (tokens[start], tokens[start + length - 1])
            assert scanned.trainable[number] == mask[here].sum()
    assert len(hashes) == len({found for _, found in hashes}) == len(groups)
    found = find_duplicates(scanned.hash, pairs[:, 1])
    assert found.documents == sum(len(group) - 1 for group in groups.values())
    assert found.groups == sum(len(group) > 1 for group in groups.values())
    assert found.first == min(tuple(group[:2]) for group in groups.values() if len(group) > 1)


def test_a_full_check_takes_bounded_memory(tmp_path):
    """One document of 160 MB, under a limit of memory that such an array does not fit into."""
    with open(tmp_path / "a.npy", "wb") as file:
        file.truncate(160_000_000)
        file.seek(-8, 2)
        np.full(1, EOS, np.uint64).tofile(file)
    program = (
        "import resource, sys, grain_sft\n"
        "from grain_sft.verify import verify\n"
        "verify(sys.argv[1], full=True, options={'eos_token_id': 2})\n"
        "used = int(next(line for line in open('/proc/self/status') if line.startswith('VmData')).split()[1]) << 10\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (used + 110_000_000,) * 2)\n"
        "report = verify(sys.argv[2], full=True, vocab_size=3, options={'eos_token_id': 2, 'dtype': 'uint64'})\n"
        "assert report.sound, report\n"
        "print(report.figures['documents'], report.figures['tokens'])\n"
    )
    np.full(100, EOS, np.uint32).tofile(tmp_path / "small.npy")
    command = [sys.executable, "-c", program, str(tmp_path / "small.npy"), str(tmp_path / "a.npy")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.stdout == "1 20000000\n", result.stderr


@pytest.fixture
def layout(tmp_path):
    return PackedLayout(grain_sft.open_corpus(write("olmo", tmp_path), eos_token_id=EOS), LENGTH)


def test_a_plan_is_sound_alone_and_with_its_corpus_and_one_of_another_corpus_is_named(tmp_path, layout):
    path = plan_files(layout)[0]["path"]
    assert verify(path).sound
    report = verify(path, corpus=tmp_path / "olmo", options={"eos_token_id": EOS})
    assert report.sound and report.figures["rows"] == len(layout) and report.figures["documents"] == 300
    report = verify(path, corpus=write("episodes", tmp_path), options={"eos_token_id": EOS})
    assert "is a plan of the documents content-sha256:" in sentences(report) and not report.sound
    assert wrongs(verify(path, corpus=tmp_path / "nothing"))[0][0] == "files"
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2] ^= 4
    Path(path).write_bytes(data)
    report = verify(path)
    assert wrongs(report) == [("files", Path(path).name, "")]
    assert "its arrays are not those that were written" in sentences(report)


def change_plan(layout, change, target=None) -> None:
    """Write a plan whose checksum is right, as a packer with a bug would write it."""
    path = Path(plan_files(layout)[0]["path"])
    whole, depends = artifact.open_file(path)
    arrays = {name: np.array(array) for name, array in whole.items()}
    change(arrays)
    artifact.save(target or path, depends, arrays)


def _twice(arrays):
    arrays["document"][-1], arrays["start"][-1] = arrays["document"][0], arrays["start"][0]
    arrays["length"][-1] = min(arrays["length"][0], arrays["length"][-1])


PLAN_FAULTS = {
    "a document twice": (_twice, r"token \d+: of document \d+ is in row \d+ a second time"),
    "a row that is too long": (lambda arrays: arrays["length"].__setitem__(0, LENGTH + 1), "but a row has 64"),
    "a piece outside its document": (lambda arrays: arrays["start"].__setitem__(5, 1), "but document"),
    "a document that is not there": (lambda arrays: arrays["document"].__setitem__(5, 300), "there are 300 documents"),
    "an empty piece": (lambda arrays: arrays["length"].__setitem__(3, 0), "piece 3 is of 0 tokens"),
    "an empty row": (lambda arrays: arrays["ends"].__setitem__(0, 0), "ends at piece 0"),
    "pieces without a row": (lambda arrays: arrays["ends"].__setitem__(-1, arrays["ends"][-1] - 1), "ends at piece"),
    "counts that are wrong": (lambda arrays: arrays["counts"].__setitem__(3, 9), "states 9 cut documents"),
    "a column of another type": (lambda arrays: arrays.update(start=arrays["start"].astype(float)), "lacks start"),
    "a column that is missing": (lambda arrays: arrays.pop("document"), "lacks document"),
    "columns of different lengths": (lambda arrays: arrays.update(start=arrays["start"][1:]), "different lengths"),
}


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_a_plan_with_a_fault_is_found_out(tmp_path, layout, fault):
    change, sentence = PLAN_FAULTS[fault]
    change_plan(layout, change, tmp_path / "mine.arrays")
    report = verify(tmp_path / "mine.arrays", corpus=tmp_path / "olmo", options={"eos_token_id": EOS})
    assert not report.sound and re.search(sentence, sentences(report)), sentences(report)


def test_fragments_of_a_document_are_no_duplicates(tmp_path):
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
    path = tmp_path / "config.json"

    def write_config(**changes):
        path.write_text(json.dumps({key: {**value, **changes.get(key, {})} for key, value in stated.items()}))
        return path

    return write_config


@pytest.mark.parametrize("kind", ["windows", "padded", "packed"])
def test_a_sound_config_is_sound_and_its_first_epoch_is_read_once(config, kind):
    path = config(layout={"kind": kind})
    pipeline = grain_sft.load(path, host=Host(0, 1))
    for full in (False, True):
        report = check(path, full=full)
        assert report.sound, sentences(report)
    assert report.what == "config" and report.figures["receipt"] == pipeline.receipt.code
    assert report.figures["rows_of_first_epoch"] == len(pipeline.source) // 4 * 4
    assert check(path, receipt=pipeline.receipt.code).sound
    other = check(path, receipt="gs1-0123456789abcdef")
    assert wrongs(other) == [("receipt", "config.json", "")] and pipeline.receipt.code in sentences(other)
    report = check(config(sampler={"sed": 1}))
    assert wrongs(report) == [("files", "config.json", "")] and "sed" in sentences(report)


def test_batches_whose_size_changes_with_the_step_are_sound(config, tmp_path):
    path = config(sampler={"schedule": [{"step": 2, "global_batch_size": 8}]})
    assert check(path).sound
    stated = {**json.loads(path.read_text()), "transforms": ["shift_targets", {"trim_to_multiple": {"multiple": 16}}]}
    path.write_text(json.dumps({**stated, "layout": {"kind": "padded", "sequence_length": LENGTH}}))
    assert check(path).sound


def test_the_parts_of_a_mixture_are_all_looked_at(tmp_path):
    roots = {kind: write(kind, tmp_path) for kind in ("olmo", "primer")}
    mixture = {kind: {"path": str(root), "eos_token_id": EOS, "weight": 1} for kind, root in roots.items()}
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps(sections("", LENGTH) | {"corpus": {"mixture": mixture}}))
    for full in (False, True):
        report = check(path, full=full)
        assert report.sound, sentences(report)
        assert report.figures["olmo"]["documents"] == report.figures["primer"]["documents"] == 300
    poke(roots["primer"] / "train_labels.bin", np.int32, 2100, -100)
    poke(roots["primer"] / "train_input_ids.bin", np.uint16, 2100, 1000)
    assert ("vocabulary", "train_input_ids.bin", "token 2100") in wrongs(check(path))


def test_a_config_over_a_damaged_plan_in_the_cache_is_found_out(config):
    """Its rows can be read, and hold other tokens than a document's."""
    path = config()
    layout = grain_sft.load(path, host=Host(0, 1)).source.layout
    change_plan(layout, lambda arrays: arrays["start"].__iadd__(np.arange(len(arrays["start"])) == 0))
    report = check(path)
    assert not report.sound and {"plan", "layout"} & {each.check for each in report.findings if each.wrong}


@pytest.mark.parametrize(
    ("key", "place", "value", "sentence"),
    [
        ("targets", (0, 0), 7, "a target is not the token that follows: row 0"),
        ("inputs_position", (1, 0), 3, "does not begin at position 0: row 1"),
        ("inputs_position", (0, 1), 9, "does not count on"),
        ("targets_segmentation", (2, 0), 9, "takes loss in another segment"),
        ("inputs", (0, 0), 5000, "holds the token 5000"),
    ],
)
def test_a_batch_that_is_not_aligned_is_found_out(config, key, place, value, sentence):
    pipeline = grain_sft.load(config(layout={"kind": "padded"}), host=Host(0, 1))
    batch = {name: array.copy() for name, array in pipeline[0].items()}
    batch["targets_segmentation"][0, 0] = 1
    assert wrong_in_batch(batch, VOCABULARY) == ""
    batch[key][place] = value
    assert sentence in wrong_in_batch(batch, VOCABULARY)


@pytest.mark.parametrize("plane", [0, 1, 2], ids=["positions", "segments", "targets"])
def test_rows_whose_planes_do_not_fit_are_found_out(tmp_path, layout, plane):
    materialize(layout, tmp_path / "rows")
    assert check(tmp_path / "rows").sound
    path = tmp_path / "rows" / "rows_0000.bin"
    row = path.stat().st_size // len(layout)
    at = 40 * row + (layout.corpus.dtype.itemsize + plane) * LENGTH + 1
    assert 4096 < at < path.stat().st_size - 4096, "not at the ends, which are hashed"
    poke(path, np.uint8, at, 77)
    assert check(tmp_path / "rows", full=False).sound
    report = check(tmp_path / "rows")
    assert wrongs(report) == [("rows", "rows_0000.bin", "row 40")], report.findings


def test_exit_codes_and_json_are_for_scripts(tmp_path, config, capsys):
    root = write("primer", tmp_path)
    assert main(["verify", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] and found["figures"]["documents"] == 300
    poke(root / "train_idx.npy", np.uint8, 140, 9)
    assert main(["verify", str(root), "--json"]) == 1
    (finding,) = (each for each in json.loads(capsys.readouterr().out)["findings"] if each["wrong"])
    assert finding["where"].endswith("train_idx.npy") and finding["check"] == "boundaries"
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().out.lower()
    assert main(["verify", str(config()), "--vocab-size", "1000"]) == 0
    for wrong in (["--fast", "--full"], ["--vocab-size", "0"], ["--refuse-duplicates"], ["--as", "thing"], ["--what"]):
        with pytest.raises(SystemExit) as status:
            main(["verify", str(root), *wrong])
        assert status.value.code == 2


def test_what_it_is_is_told_by_name_and_content(tmp_path, config):
    root = write("olmo", tmp_path)
    corpus = grain_sft.open_corpus(root, eos_token_id=EOS)
    corpus.save(tmp_path / "index.json")
    assert verify(tmp_path / "index.json").what == "corpus"
    assert verify(config()).what == "config"
    path = plan_files(PackedLayout(corpus, LENGTH))[0]["path"]
    Path(path).rename(tmp_path / "plan")
    assert verify(tmp_path / "plan").what == "plan"
    (tmp_path / "mix.txt").write_text("a,olmo/token_ids_part_0000.npy\n")
    assert verify(tmp_path / "mix.txt", options={"dtype": "uint16"}).what == "corpus"
    with gzip.open(tmp_path / "odd.json", "wb") as file:
        file.write(b"{}")
    assert not verify(tmp_path / "odd.json").sound
    with pytest.raises(CorpusError, match="expected one of corpus, plan, config"):
        verify(root, what="thing")
