"""`verify` names the file and the place of any damage to a corpus, and calls a sound corpus sound."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from damaged import VOCABULARY, assert_finds, check, poke, sentences, write, write_train, wrongs
from prepared import save_trained
from python_runs import run_python
from sft_files import EOS, documents, write_olmo

import grain_sft
from grain_sft.verify import Report, content, verify
from grain_sft.verify.content import find_duplicates, scan_documents

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("full", [False, True], ids=["fast", "full"])
@pytest.mark.parametrize("kind", ["olmo", "episodes", "primer", "openchat"])
def test_a_sound_corpus_is_sound(tmp_path, kind, full, monkeypatch):
    read, threads = grain_sft.Corpus.read, set()
    monkeypatch.setattr(grain_sft.Corpus, "read", lambda *place: threads.add(threading.get_ident()) or read(*place))
    report = assert_finds(write(kind, tmp_path), [], full=full)
    assert (threading.get_ident() in threads) == full  # the small reads of a fast check are concurrent
    assert report.figures["documents"] == 300
    assert ("duplicate_documents" in report.figures) == full


def test_verify_states_which_split_of_a_folder_it_checks(tmp_path):
    for split in ("train", "val"):
        write_olmo(tmp_path / "my sft" / split, documents(20))
    (finding,) = (each for each in check(tmp_path / "my sft").findings if "training split" in each.message)
    assert not finding.wrong and finding.message.endswith(f"grain-sft verify '{tmp_path / 'my sft' / 'val'}'")
    assert not any("split" in each.message for each in check(tmp_path / "my sft" / "train").findings)


IMPOSSIBLE = [
    ("olmo", "token_ids_part_0001.npy", np.uint16, 1000, "is 1000, but the vocabulary has 1000 ids"),
    ("episodes", "train/shard_00001/tokens.bin", np.uint32, 1000, "is 1000, but the vocabulary has 1000 ids"),
    ("primer", "train_input_ids.bin", np.uint16, 1000, "is 1000, but the vocabulary has 1000 ids"),
    ("olmo", "labels_mask_part_0001.npy", np.uint8, 2, "holds 2; expected 0 or 1"),
    ("episodes", "train/shard_00001/mask_weighted.bin", np.float32, np.nan, "expected a finite weight"),
    ("episodes", "train/shard_00001/mask_weighted.bin", np.float32, -0.5, "-0.5; expected a finite weight, 0 or"),
    ("primer", "train_labels.bin", np.int32, 5, "holds 5; expected the token itself or -100, not shifted"),
]


@pytest.mark.parametrize(("kind", "path", "dtype", "value", "expected"), IMPOSSIBLE)
def test_an_impossible_id_or_loss_in_the_middle_of_a_file_is_found(tmp_path, kind, path, dtype, value, expected):
    root = write(kind, tmp_path, 1500)
    place = np.fromfile(root / path, dtype).size // 2
    poke(root / path, dtype, place, value)
    if path == "train_input_ids.bin":
        poke(root / "train_labels.bin", np.int32, place, -100)
    assert check(root, full=False).sound or kind == "episodes"  # the fast check reads the damaged episode
    report = check(root)
    name = "vocabulary" if value == 1000 else "loss"
    assert wrongs(report)[0] == (name, Path(path).name, f"token {place}") and expected in sentences(report)
    if value == 1000:
        assert report.figures["highest_token"] == 1000 and check(root, vocab_size=1001).sound


@pytest.mark.parametrize("full", [False, True], ids=["fast", "full"])
def test_shifted_boundaries_and_boundaries_outside_of_the_tokens_are_found(tmp_path, full):
    root = write("episodes", tmp_path, gap=1)
    paths = sorted(root.glob("train/*/episodes.idx"))
    whole = np.fromfile(paths[0], np.uint64)
    for index in paths:
        poke(index, np.uint64, slice(0, None, 2), np.fromfile(index, np.uint64)[::2] - np.uint64(1))
    ((kind, _, _),) = wrongs(report := check(root, full=full))
    assert kind == "boundaries" and "don't end with the EOS token 2" in sentences(report)
    whole[-1] += np.uint64(1)
    whole.tofile(paths[0])
    report = check(root, full=full)
    assert wrongs(report)[0][:2] == ("boundaries", "episodes.idx") and "begins at token" in sentences(report)


def test_boundaries_are_called_shifted_if_documents_begin_with_the_eos_of_the_document_before(tmp_path):
    pairs = [(0, 3), *((4 * number - 1, 4) for number in range(1, 50))]
    corpus = write_train(tmp_path / "shifted", [5, 6, 7, EOS] * 50, np.ones(200), pairs)
    assert_finds(corpus, [("boundaries", "episodes.idx", "document 1")], "The boundaries are shifted by a token")
    pairs = [(2 * number, 2) for number in range(100)]
    for end, ended, cut, text in (
        *((7, ended, 95 - ended, f"{ended} of 100 documents checked end with the token 7") for ended in (95, 60)),
        (EOS, 40, 60, "60 of 100 documents checked don't end with the EOS token 2"),
    ):
        corpus = write_train(tmp_path / str(ended), [5, end] * ended + [*range(100, 300 - 2 * ended)], np.ones(200), pairs)
        (corpus / "prepare.json").write_text(json.dumps({"splits": {"train": {"documents": 100, "truncated": cut}}}))
        assert text in str(assert_finds(corpus, []).findings)


def test_a_gzip_file_whose_checksum_is_wrong_is_found(tmp_path):
    root = write("olmo", tmp_path)
    path = root / "token_ids_part_0001.csv.gz"
    poke(path, np.uint8, -6, ~np.fromfile(path, np.uint8)[-6])  # a byte of the CRC
    for full in (False, True):
        assert_finds(root, [("boundaries", path.name, "")], full=full)


@pytest.mark.parametrize("change", ["replaced", "shortened", "gone", "grown"])
def test_files_that_differ_from_their_index_are_named(tmp_path, change):
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
    if change == "replaced":  # other changes are found when the index is opened, which stops at the first file
        assert {name for _, name, _ in wrongs(report)} == {path.name for path in paths}
    assert any(path.name in sentences(report) for path in paths)


def test_wrong_statistics_and_source_numbers_without_an_input_are_found(tmp_path):
    root = write("olmo", tmp_path / "[1]")
    tokens = sum(len(each) for each, _ in documents(300))
    manifest = {
        "tokenizer": {"vocab_size": VOCABULARY, "eos_token_id": EOS},
        "inputs": [{"path": name} for name in "abc"],
        "splits": {"train": {"documents": 300, "tokens": tokens, "trainable_tokens": 7}, "val": {"documents": 9}},
    }
    (root / "prepare.json").write_text(json.dumps(manifest))
    assert verify(root).sound
    assert_finds(root, [("statistics", "prepare.json", "")], "7 trainable_tokens")
    others = {"label_mask_paths": f"{write('olmo', tmp_path / 'other')}/labels_mask_*"}
    for options in ({"use_loss_mask": False}, others):
        assert verify(root, full=True, options=options).sound
    del manifest["splits"]["train"]["trainable_tokens"], manifest["inputs"][-1]
    (root / "prepare.json").write_text(json.dumps(manifest))
    report = verify(root, full=True)
    assert wrongs(report)[0] == ("boundaries", "sources.bin", "document 2")
    assert report.left_out == {"boundaries": 80}  # 100 documents are wrong, and 20 are listed
    whole = Report("config", "a", full=True)
    whole.take(report)
    whole.wrong("boundaries", "a", "the 21st")
    assert whole.findings[-1].message == "the 21st" and whole.left_out == report.left_out


def test_statistics_of_another_corpus_are_not_compared(tmp_path):
    """prepare.json may lie in the folder above, or be of only one of two opened corpora, or of more files than are opened."""
    root = write("olmo", tmp_path)
    other = {"tokenizer": {"vocab_size": 9}, "splits": {"train": {"documents": 9, "tokens": 99}}}
    (tmp_path / "prepare.json").write_text(json.dumps(other))
    with pytest.raises(grain_sft.GrainSftError, match="vocab_size=-1: expected an integer"):
        check(root, vocab_size=-1)
    assert any("--vocab-size" in each.message for each in assert_finds(root, [], vocab_size=None).findings)
    (tmp_path / "prepare.json").unlink()
    (root / "token_ids_part_0000_old.npy").mkdir()  # not a part of the corpus
    own = {"splits": {"train": {"documents": 300, "tokens": sum(len(each) for each, _ in documents(300))}}}
    (root / "prepare.json").write_text(json.dumps(own))
    write_olmo(tmp_path / "second", documents(20))
    for where in (root, tmp_path, root / "token_ids_part_0000.npy", root / "token_ids_part_000[01].npy"):
        assert_finds(where, [])
    (root / "prepare.json").write_text(json.dumps(own).replace("300", "299"))
    assert "states 299 documents, 4871 tokens, but" in sentences(check(root))


def test_another_tokenizer_next_to_the_corpus_is_found(tmp_path):
    root = write("episodes", tmp_path)
    save_trained(root / "tokenizer")
    assert_finds(root, [("vocabulary", "tokenizer", "")], "is another tokenizer", vocab_size=None)


def test_duplicates_are_counted_and_are_faults_only_with_refuse_duplicates(tmp_path, run_command):
    docs = documents(300)
    docs += [docs[7], docs[9], docs[7]]
    root = write_olmo(tmp_path / "olmo", docs, part_tokens=1000)
    report = check(root)
    assert report.sound and report.figures["duplicate_documents"] == 3
    assert report.figures["duplicate_tokens"] == 2 * len(docs[7][0]) + len(docs[9][0])
    arguments = ["verify", root, "--full", "--eos-token-id", EOS, "--vocab-size", "1000"]
    assert "3 documents" in run_command(*arguments).out
    assert "documents 7 and 300" in run_command(*arguments, "--refuse-duplicates", status=1).out


@pytest.mark.parametrize("block", [1, 5, 64, 1 << 20])
def test_hashes_of_documents_are_equal_exactly_if_their_tokens_are(tmp_path, monkeypatch, block):
    """Compare hashes with the bytes of documents that overlap, are out of order, are empty, or are longer than a block."""
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
        if length:
            own = tokens[start : start + length]
            groups.setdefault(own.tobytes(), []).append(number)
            hashes.add((own.tobytes(), int(scanned.hash[number])))
            assert (scanned.first[number], scanned.last[number]) == (own[0], own[-1])
            assert scanned.trainable[number] == mask[start : start + length].sum()
    assert len(hashes) == len({found for _, found in hashes}) == len(groups)
    found = find_duplicates(scanned.hash, pairs[:, 1])
    assert found.documents == sum(len(group) - 1 for group in groups.values())
    assert found.groups == sum(len(group) > 1 for group in groups.values())
    assert found.first == min(tuple(group[:2]) for group in groups.values() if len(group) > 1)


FULL_CHECK = """
import resource, sys, grain_sft
from grain_sft.verify import verify
verify(sys.argv[1], full=True, options={'eos_token_id': 2})
used = int(next(line for line in open('/proc/self/status') if line.startswith('VmData')).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + 110_000_000,) * 2)
report = verify(sys.argv[2], full=True, vocab_size=3, options={'eos_token_id': 2, 'dtype': 'uint64'})
assert report.sound, report
print(report.figures['documents'], report.figures['tokens'])
"""


def test_a_full_check_takes_bounded_memory(tmp_path):
    """The full check of one document of 160 MB takes at most 110 MB."""
    with open(tmp_path / "a.npy", "wb") as file:
        file.truncate(160_000_000)
        file.seek(-8, 2)
        np.full(1, EOS, np.uint64).tofile(file)
    np.full(100, EOS, np.uint32).tofile(tmp_path / "small.npy")
    assert run_python("-c", FULL_CHECK, tmp_path / "small.npy", tmp_path / "a.npy").stdout == "1 20000000\n"
