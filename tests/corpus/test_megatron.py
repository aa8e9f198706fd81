"""Tests of opening Megatron's corpora, which are pairs of a .bin and an .idx file.

Documents and splits are those of megatron-core, every form of path works, and damaged files are refused.
"""

import itertools
import json
import shutil
import threading

import numpy as np
import pytest
from batches import load, sections, write_config
from megatron_corpora import CASES, GOLDEN, write_megatron
from sft_files import error_of

from grain_sft import GrainSftError, NpyDataSource, PackedLayout, PaddedLayout, WindowLayout, open_corpus
from grain_sft.corpus import FORMATS, DirectoryListing
from grain_sft.corpus.formats import metadata
from grain_sft.layout import RunDocuments
from grain_sft.storage import files
from grain_sft.verify import verify

LAYOUTS = (WindowLayout, PaddedLayout, PackedLayout)
SUBSETS = ("train", "valid", "test")
# Five documents. Each is a list of sequences, and a sequence is a list of tokens.
DOCS = [[[5, 6, 7], [8]], [[]], [[9, 10, 11, 12], [], [13, 14]], [], [[15, 16, 17]]]


def joined(sequences):
    return list(itertools.chain.from_iterable(sequences))


def lists(corpus, documents):
    """Return the tokens of each document or sequence. `documents` has two arrays: starts and lengths."""
    return [corpus.read(start, start + length)[0].tolist() for start, length in zip(*documents, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_sequences_and_documents_are_those_of_megatron_core(name):
    corpus, case = open_corpus(GOLDEN / name), CASES[name]
    assert lists(corpus, corpus.sequences) == case["sequences"]
    grouped = [joined(case["sequences"][first:stop]) for first, stop in itertools.pairwise(case["documents"])]
    assert lists(corpus, corpus.documents) == grouped
    assert corpus.signed == name.rpartition("_")[2].startswith("int")


@pytest.mark.parametrize("name", ["web_uint16", "chat_int32"])
def test_splits_are_the_ranges_that_megatron_core_builds(name):
    tokens = CASES[name]["sequences"]
    for split, ranges in CASES[name]["splits"].items():
        found = []
        for subset, expected in zip(SUBSETS, ranges, strict=True):
            if expected is None:
                assert f"nothing for subset='{subset}'" in error_of(GOLDEN / name, split=split, subset=subset)
                continue
            corpus = open_corpus(GOLDEN / name, split=split, subset=subset)
            assert lists(corpus, corpus.sequences) == (tokens[slice(*expected)] if expected else [])
            assert corpus.documents.length.sum() == corpus.num_tokens
            found += lists(corpus, corpus.sequences)
        assert found == tokens


def test_documents_and_splits_are_the_same_whatever_the_header_counts(tmp_path):
    """Some headers count documents. Others count the entries of the document index, which are one more.

    The size of the .idx file shows which of the two a header counts.
    """
    for name, entries in (("a", True), ("b", False)):
        prefix = write_megatron(tmp_path / name, DOCS, entries=entries)
        corpus = open_corpus(prefix)
        assert lists(corpus, corpus.documents) == [joined(document) for document in DOCS], name
        found = [open_corpus(prefix, split="3,4,0", subset=subset) for subset in SUBSETS[:2]]
        one, other = ([[5, 6, 7, 8], []], [[9, 10, 11, 12, 13, 14], [], [15, 16, 17]])
        assert [lists(part, part.documents) for part in found] == [one, other], name
        assert open_corpus(prefix, split="1").fingerprint != corpus.fingerprint


def test_every_form_of_a_path_opens_the_same_corpus(tmp_path, monkeypatch):
    one, two, _ = (write_megatron(tmp_path / "data" / name, DOCS, "uint16") for name in ("one_text_document", "two", "._two"))
    monkeypatch.chdir(tmp_path)
    alone, both = open_corpus(one).fingerprint, open_corpus([one, two]).fingerprint
    files = [f"{one}.bin", f"{one}.idx"]
    shutil.copytree("data", "1 run")
    lists = (files, files[::-1], [one], [one, files[1]])
    for path in (*files, *lists, "data/one_text_document", "data/one_*.bin", "1 run/one_text_document"):
        assert open_corpus(path).fingerprint == alone, path
    shutil.copytree("data", "more/train")
    pairs = (["data/one_text_document", two], f"{one} {two}".split())
    for path in ("data", "more", ["data"], [one, "data/two"], *pairs, "data/*.bin"):
        assert open_corpus(path).fingerprint == both, path
    # A blend is weights and prefixes in turn.
    blend = ["0.3", one, "0.7", two]
    for path in ([0.3, one, 0.7, two], blend, " ".join(blend), "0.3 data/one_text_document 0.7 data/two"):
        corpus = open_corpus(path)
        assert (corpus.weights, [shard.num_tokens for shard in corpus.shards]) == ((0.3, 0.7), [13, 13])
    (tmp_path / "1").mkdir()  # 1 is a weight, although a folder has this name
    assert open_corpus([1, one]).weights == (1.0,)
    # Every path is remapped.
    far = ["/far/one_text_document", "/far/two"]
    for path in ("/far/two", "memory://far/two", "1 /far/one_text_document 2 /far/two", far):
        here = dict.fromkeys(("/far/", "memory://far/"), str(tmp_path / "data"))
        assert open_corpus(path, path_remap=here).shards[-1].path == f"{two}.bin"
    assert len({both, alone, corpus.fingerprint, open_corpus([1, one]).fingerprint}) == 4
    # A sources.bin next to two prefixes is ignored, because it does not state which of them it describes.
    (tmp_path / "data/sources.bin").write_bytes(b"")
    assert open_corpus(one).sources_file is None
    (tmp_path / "mix.txt").write_text("web,data/one_text_document.bin\ncode,data/two.bin\n")
    mixed = open_corpus(tmp_path / "mix.txt")
    assert (mixed.fingerprint, [shard.label for shard in mixed.shards]) == (both, ["web", "code"])


@pytest.mark.parametrize("kind", ["split", "blend"])
def test_a_split_or_a_blend_is_not_saved_as_maxtexts_index(tmp_path, kind):
    """MaxText would read the first tokens of the file, which belong to another subset, or would ignore the weights."""
    prefix, save = write_megatron(tmp_path / "a", DOCS), {"format": "maxtext", "sequence_length": 4}
    where, options = (prefix, {"split": "1,1", "subset": "valid"}) if kind == "split" else ([0.5, prefix], {})
    with pytest.raises(GrainSftError, match="lists whole files in order"):
        open_corpus(where, **options).save(tmp_path / "index.json", **save)
    open_corpus(prefix).save(tmp_path / "index.json", **save)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_ignores_the_weights_of_a_blend_is_refused(tmp_path, layout):
    prefix = write_megatron(tmp_path / "a", DOCS)
    with pytest.raises(GrainSftError, match=r"a blend of weights .* does not follow. Leave the weights out"):
        NpyDataSource(layout(open_corpus([1, prefix, 2, prefix]), 4))


def test_layouts_read_every_token_of_a_split(tmp_path):
    prefixes = [write_megatron(tmp_path / name, DOCS) for name in "ab"]
    corpus = open_corpus(prefixes, split="3,4", subset="valid", eos_token_id=0)
    expected = [9, 10, 11, 12, 13, 14, 15, 16, 17]
    assert NpyDataSource(WindowLayout(corpus, 9)).read(range(2))["tokens"].tolist() == [expected, expected]
    padded = NpyDataSource(PaddedLayout(corpus, 6)).read(range(4))["tokens"]
    assert padded.tolist() == [[9, 10, 11, 12, 13, 14], [15, 16, 17, 0, 0, 0]] * 2
    packed = NpyDataSource(PackedLayout(corpus, 9))
    assert sorted(packed.read(range(len(packed)))["tokens"].reshape(-1).tolist()) == sorted(expected * 2)


def test_a_saved_index_keeps_ranges_and_weights(tmp_path):
    one, two = (write_megatron(tmp_path / name, DOCS) for name in "ab")
    corpus = open_corpus([3, one, 1, two], split="3,4", subset="valid", eos_token_id=0)
    corpus.save(tmp_path / "index.json")
    found = open_corpus(tmp_path / "index.json")
    assert found == corpus and found.fingerprint == corpus.fingerprint
    assert found.weights == (3, 1) and found.signed and lists(found, found.sequences) == lists(corpus, corpus.sequences)
    assert "an index takes no split. Build the index with this split" in error_of(tmp_path / "index.json", split="3,4")
    stored = json.loads((tmp_path / "index.json").read_text())
    stored["shards"][0]["boundaries"]["sequences"] = [4, 7]
    (tmp_path / "index.json").write_text(json.dumps(stored))
    assert "It was edited or damaged" in error_of(tmp_path / "index.json")


def test_the_blend_and_the_split_of_a_config_decide_the_receipt(tmp_path):
    for name in ("one", "two"):
        write_megatron(tmp_path / "data" / name, [[list(range(40))]] * 9)

    def receipt(**corpus):
        corpus = {"path": [0.3, "data/one", 0.7, "data/two"], **corpus}
        layout = {"kind": "megatron_gpt", "num_samples": 20}
        config = sections(None, 16, corpus=corpus, layout=layout, order="sequential")
        return load(write_config(tmp_path / "config.json", config)).receipt.code

    (tmp_path / "0.3").mkdir()  # 0.3 is a weight, although a folder has this name
    changes = [{"split": "1,1"}, {"split": "2,1"}, {"split": "1,1", "subset": "valid"}]
    changes += [{"path": path} for path in ("data", [1, "data/one", 2, "data/two"], "0.3 data/one 0.7 data/two")]
    # The last change writes the first config's blend as text.
    *codes, same = [receipt(), *(receipt(**change) for change in changes)]
    assert len(set(codes)) == len(codes) and same == codes[0]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_negative_token_is_never_in_a_row(tmp_path, dtype, layout):
    prefix = write_megatron(tmp_path / "a", [[[5, 6, 7]] * 3, [[8, -9, 10]]], dtype)
    byte = 10 * np.dtype(dtype).itemsize
    source = NpyDataSource(layout(open_corpus(prefix, eos_token_id=0), 12))
    for read in (source.read, source.read_rows) if dtype != "int64" else (source.read,):
        with pytest.raises(GrainSftError, match=rf"a.bin: byte {byte}: token 10 is -9; expected 0 or more"):
            read(range(len(source)))


def test_only_a_full_verify_finds_a_negative_token_in_the_middle_of_a_file(tmp_path):
    prefix = write_megatron(tmp_path / "a", [[[7] * 3000], [[7] * 100 + [-2] + [7] * 2899], [[7] * 3000]])
    assert not any(finding.wrong for finding in verify(prefix).findings)
    [found] = [finding for finding in verify(prefix, full=True).findings if finding.wrong]
    assert "byte 12400: token 3100 is -2" in found.message


# Mistakes in an .idx file by name. Each has the arguments of `write_megatron` that make the mistake, and the message.
# `open_corpus` finds the mistakes of HEADERS, and `Corpus.documents` those of ARRAYS.
HEADERS = {
    "magic": ({"magic": b"MMIDIDX\0\1"}, "byte 0: expected the magic"),
    "version": ({"version": 2}, "byte 9: version 2; expected 1"),
    "code": ({"code": 9}, "byte 17: dtype code 9; expected 1 to 5 or 8"),
    "floats": ({"code": 7}, "byte 17: dtype code 7 is float32; expected integers"),
    "a wider code": ({"code": 5}, "52 bytes, but .*lists 13 tokens of 8 bytes; expected 104"),
    "multimodal": ({"tail": b"\0" * 7}, "byte 166: one byte per sequence follows .* the data are multimodal"),
    "longer": ({"tail": b"\0" * 3}, "169 bytes, but its header .bytes 18 and 26. states 7 sequences and 6 documents"),
    "a negative size": ({"sizes": [3, 1, 0, -4, 8, 2, 3]}, "byte 46: sequence 3 has -4 tokens"),
    "other sizes": ({"sizes": [3, 1, 0, 4, 1, 2, 3]}, "52 bytes, but .*a.idx lists 14 tokens of 4 bytes; expected 56"),
}
ARRAYS = {
    "exchanged sizes": ({"sizes": [1, 3, 0, 4, 0, 2, 3]}, "byte 70: sequence 1 begins at byte 12 .*; expected 4"),
    "pointers": ({"pointers": [0, 12, 16, 16, 24, 32, 40]}, "byte 94: sequence 4 begins at byte 24 .*; expected 32"),
    "a document index from 1": ({"borders": [1, 2, 3, 6, 6, 7]}, "byte 118: entry 0 of the document index is 1"),
    "a document index that descends": ({"borders": [0, 3, 2, 6, 6, 7]}, "byte 134: entry 2 of the document index is 2"),
    "an index that ends early": ({"borders": [0, 2, 3, 6, 6, 6]}, "byte 158: entry 5 .* is 6; expected .* 0 to 7"),
}


@pytest.mark.parametrize("name", [*HEADERS, *ARRAYS])
def test_the_error_of_a_damaged_index_names_the_byte(tmp_path, name):
    changed, expected = (HEADERS | ARRAYS)[name]
    with pytest.raises(GrainSftError, match=expected) as error:
        corpus = open_corpus(write_megatron(tmp_path / "a", DOCS, **changed), format="megatron")
        assert name in ARRAYS, "a wrong header is refused when the corpus is opened"
        _ = corpus.documents
    assert "a.idx" in str(error.value)


def test_an_index_that_is_cut_short_or_lists_nothing_is_refused(tmp_path):
    prefix = write_megatron(tmp_path / "a", DOCS)
    data = (tmp_path / "a.idx").read_bytes()
    for size in range(len(data)):
        (tmp_path / "a.idx").write_bytes(data[:size])
        assert f"{prefix}.idx" in error_of(prefix, format="megatron")
    assert "the document index has no entry" in error_of(write_megatron(tmp_path / "b", [], entries=False, borders=[]))


def test_paths_and_options_that_do_not_fit_are_refused(tmp_path):
    one = two = write_megatron(tmp_path / "a", DOCS)
    other = write_megatron(tmp_path / "c", DOCS, "uint16")
    np.arange(5, dtype=np.uint16).tofile(tmp_path / "x.npy")
    _, *splits = (write_megatron(tmp_path / name, DOCS) for name in ("both/a", "splits/train_a", "splits/valid_a"))
    shutil.copy(tmp_path / "x.npy", tmp_path / "both")
    assert open_corpus(tmp_path / "both", format="megatron").num_tokens == 13
    for path, keys, expected in (
        ([one, other], {}, f"c.bin: its tokens are uint16, but those of {one}.bin are int32"),
        ([f"{one}.bin", tmp_path / "x.npy"], {}, "only some files are Megatron's"),
        ([1, one, "b", two], {}, "expected weights and prefixes in turn"),
        (f"{one} {other}", {}, f"Write several paths as a list: {[str(one), str(other)]}"),
        (f"1 {one} 2", {}, "expected weights and prefixes in turn"),
        *((wrong, {}, "expected finite numbers, 0 or more") for wrong in ([0, one, 0, two], [-1, one, 2, two])),
        (one, {"root": tmp_path / "other"}, "lies outside of"),
        (tmp_path / "both", {}, "a.idx. Give format='megatron'"),
        (tmp_path / "splits", {}, f"holds {splits[0]}.bin and {splits[1]}.bin, so a run would also train on held-out tokens"),
        ([1, tmp_path, 1, one], {}, "2 prefixes; expected one for each weight"),
        (tmp_path / "nothing", {"format": "megatron"}, "nothing: neither a prefix of .bin and .idx files nor a folder"),
        (one, {"dtype": "uint16"}, "states int32 tokens, but dtype=uint16 was given"),
        (one, {"split": "a,b"}, "expected up to three numbers"),
        (one, {"split": "0,0"}, "at least one of them above 0"),
        (one, {"split": "9" * 400}, "finite and at least one"),
        (one, {"subset": "valid"}, "and a split, such as"),
        (one, {"split": "1,1", "subset": "val"}, "expected one of train, valid, test"),
        (one, {"use_loss_mask": True}, "this file has no loss mask"),
        (one, {"label_mask_paths": str(tmp_path / "x.npy")}, "all of its tokens take loss"),
        (one, {"eos_token_id": 1 << 31}, "0 to 2147483647"),
        (tmp_path / "x.npy", {"split": "1,1", "dtype": "uint16"}, "only Megatron's files are split"),
    ):
        assert expected in error_of(path, **keys)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_replaced_after_it_was_opened_is_refused(tmp_path, suffix):
    corpus = open_corpus(write_megatron(tmp_path / "a", [[[*range(100)]], [[*range(50)]]]))
    write_megatron(tmp_path / "b", [[[*range(99)]], [[*range(51)]]])
    shutil.copy(tmp_path / f"b{suffix}", tmp_path / f"a{suffix}")
    with pytest.raises(GrainSftError, match=rf"a\{suffix}: the file has the size that was indexed, but other content"):
        corpus.document(1)


def test_the_requests_for_a_list_in_a_bucket_are_made_at_once(monkeypatch):
    both = threading.Barrier(2, timeout=10)  # breaks if one request waits for the other
    monkeypatch.setattr(metadata, "_list", lambda folder: ["x.bin", "x.idx", str(both.wait())])
    monkeypatch.setattr(files, "exists", lambda path: both.wait() >= 0)
    for paths in (["gs://a/x.bin", "gs://b/x.idx"], ["gs://a/x", "gs://b/x"]):
        assert FORMATS.make("megatron").detect_list(paths, DirectoryListing())


def test_commands_accept_a_blend_and_a_split(tmp_path, run_command, own_cache):
    web, code = (write_megatron(tmp_path / name, [[[*range(3, 12), 2]]] * 20) for name in ("web", "code"))
    where = ["0.3", web, "0.7", code, "--split", "3,1", "--eos-token-id", "2"]
    run_command("index", *where, "--subset", "valid", "--output", tmp_path / "index.json")
    assert open_corpus(tmp_path / "index.json").num_documents == 10
    verified = run_command("verify", " ".join(where[:4]), *where[4:], "--full", "--vocab-size", "12").out
    assert "tokens in documents     300" in verified
    corpus = {"path": [web, code], "split": "3,1", "subset": "valid", "eos_token_id": 2}
    config = write_config(tmp_path / "config.json", sections(None, 20, corpus=corpus, global_batch_size=2))
    shown = "".join(run_command(command, config, "--step", "1").out for command in ("inspect", "trace"))
    assert any(name in shown for name in ("web.bin", "code.bin")) and "document" in shown


def test_the_documents_of_a_stage_may_outnumber_its_tokens(tmp_path):
    corpora = [open_corpus(write_megatron(tmp_path / name, [[[]]] * 12 + [[[1, 2, 3, 4]]] * 2)) for name in "ab"]
    layouts, documents = [WindowLayout(corpus, 4) for corpus in corpora], np.array([12, 13])
    run = RunDocuments(layouts)
    for layout in layouts:
        assert run.within(layout, run.of(layout, documents)).tolist() == [12, 13]
