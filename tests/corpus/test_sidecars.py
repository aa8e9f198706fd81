"""Sidecar files (masks, boundaries) are found however the token files are named, and are never read as tokens."""

import csv
import gzip
import json
import logging
import os
import shutil

import numpy as np
import pytest
import sft_files as sft
from megatron_corpora import write_megatron

from grain_sft import open_corpus
from grain_sft.config.parts import make_corpus
from grain_sft.corpus.formats.metadata import Json
from grain_sft.errors import RemoteTimeoutError


@pytest.fixture
def parts(tmp_path):
    """Folder of a raw corpus of OLMo-core in three parts. The ends of the parts cut documents."""
    return sft.write_olmo(tmp_path / "sft", sft.documents(), part_tokens=240, sources=True)


@pytest.mark.parametrize("dtype", [None, "uint16"])
def test_masks_and_boundaries_are_found_however_the_parts_are_named(parts, tmp_path, dtype):
    whole, tokens = open_corpus(parts, eos_token_id=sft.EOS), sft.tokens_of(parts)
    mix, index, of_list, maxtext = (tmp_path / name for name in ("mix.txt", "index.json", "list.json", "maxtext.json"))
    mix.write_text("".join(f"label,{path}\n" for path in tokens))
    whole.save(index)
    open_corpus(tokens, eos_token_id=sft.EOS).save(of_list)
    plain = open_corpus(tokens, eos_token_id=sft.EOS, use_loss_mask=False)
    plain.save(maxtext, format="maxtext", sequence_length=8, tokenizer="mine")
    globs = [f"{parts}/{pattern}" for pattern in ("token_ids_part_*.npy", "*.npy", "*")]
    two_globs = [f"{parts}/token_ids_part_*[01].npy", f"{parts}/token_ids_part_*[2-9].npy"]
    lists = [two_globs, [str(path) for path in tokens], [*reversed(sft.masks_of(parts)), *tokens]]
    for where in (parts, parts.parent, *globs, *lists, mix, index, of_list, maxtext):
        corpus = open_corpus(where, dtype=dtype, eos_token_id=sft.EOS)
        assert corpus.fingerprint == whole.fingerprint, where
        assert [shard.loss for shard in corpus.shards] == [shard.loss for shard in whole.shards], where
        sft.assert_documents(corpus, sft.documents(), sources=corpus.sources is not None)
        assert corpus.sources is not None or where in (mix, maxtext), where
        path = [str(each) for each in where] if isinstance(where, list) else str(where)
        assert make_corpus({"path": path, "eos_token_id": sft.EOS}, "config").fingerprint == whole.fingerprint, where


@pytest.mark.parametrize(
    ("write", "options", "patterns"),
    [
        (sft.write_episodes, {"shards": 3}, ("train/shard_*/tokens.bin", "train/shard_*/*.bin", "train/shard_*/*")),
        (sft.write_primer, {"sources": True}, ("train_input_ids.bin", "train_*.bin", "*")),
    ],
)
def test_sidecars_of_other_formats_are_found_for_listed_files(tmp_path, write, options, patterns):
    docs = sft.documents()
    root = write(tmp_path / "x", docs, **options)
    for path in root.glob("train/shard_*/"):
        (path / "segment_ids.bin").write_bytes(b"\0" * 7)
    whole = open_corpus(root)
    for pattern in patterns:
        for where in (f"{root}/{pattern}", [f"{root}/{pattern}"], sorted(root.glob(pattern))):
            corpus = open_corpus(where)
            assert corpus == whole
            sft.assert_documents(corpus, docs, sources=corpus.sources is not None)


def test_a_listed_mask_whose_tokens_are_not_listed_is_named(parts):
    mask, tokens = sft.masks_of(parts), sft.tokens_of(parts)
    expected = f"{mask[0]}: belongs to the token file {tokens[0]}, which is not among the files"
    assert expected in sft.error_of([mask[0], tokens[1]], dtype="uint16")
    for where in (mask[1], f"{parts}/labels_mask*.npy"):
        assert "belongs to the token file" in sft.error_of(where, dtype="uint8")


NOT_TOKENS = ["json", "parquet", "jsonl.gz", "mix", "yml", "txt", "arrow", "pkl", "ds.index", "tfrecord-00000-of-00001"]


@pytest.mark.parametrize("suffix", NOT_TOKENS)
def test_files_whose_names_are_not_those_of_token_files_are_refused(parts, suffix):
    (parts / f"data.{suffix}").write_bytes(b"12345678")
    expected = "a Parquet file" if suffix == "parquet" else "not a token file's name. Name token files only; open a mix"
    assert f"data.{suffix}: {expected}" in sft.error_of(f"{parts}/*", dtype="uint8")


def test_a_part_continues_a_document_only_if_the_part_before_it_is_listed_before_it(parts):
    first, second, third = sft.tokens_of(parts)
    corpus = open_corpus([second, first], eos_token_id=sft.EOS)
    for found, whole in zip(corpus.read(0, corpus.num_tokens), sft.joined(sft.documents()), strict=True):
        np.testing.assert_array_equal(found, np.concatenate([whole[240:480], whole[:240]]))
    together = open_corpus([first, second], eos_token_id=sft.EOS)
    assert together.num_documents == corpus.num_documents - 1  # one document is whole now
    assert corpus.sources is None
    (parts / "dataset_statistics.json").write_text(json.dumps({"continued_parts": [1, 2]}))
    pieces = [open_corpus(path, eos_token_id=sft.EOS).num_documents for path in (first, third)]
    second.unlink()
    assert open_corpus(f"{parts}/token_ids*.npy", eos_token_id=sft.EOS).num_documents == sum(pieces)


def test_boundary_files_of_dolma_with_five_columns_are_read_for_plain_token_files(tmp_path):
    """The columns are start, end, id, src and loc, written by Python's csv. An id holds any character but a line break."""
    docs = sft.documents()
    for number, some in enumerate((docs[:25], docs[25:])):
        np.concatenate([tokens for tokens, _ in some]).astype("<u2").tofile(tmp_path / f"web-{number:05d}.npy")
        with gzip.open(tmp_path / f"web-{number:05d}.csv.gz", "wt", newline="") as file:
            start = 0
            for at, (tokens, _) in enumerate(some):
                name = ["plain", "with, comma", 'with "quotes"', "ünïcode", "long" * 500][at % 5]
                csv.writer(file).writerow([start, start + len(tokens), name, f"s3://b/{at}.jsonl.gz", at])
                start += len(tokens)
    every = [(tokens, np.ones(len(tokens), np.bool_)) for tokens, _ in docs]
    for where in (tmp_path, f"{tmp_path}/*.npy", sorted(tmp_path.glob("*.npy")), f"{tmp_path}/*"):
        sft.assert_documents(open_corpus(where, dtype="uint16"), every)
    sft.assert_documents(open_corpus(tmp_path, dtype="uint16", eos_token_id=sft.EOS), every)
    (tmp_path / "web-00000.csv.gz").write_bytes(gzip.compress(b"0,5,a,b,0\nfive,9,a,b,1\n"))
    assert "csv.gz:2: expected 'start,end' in digits, found 'five,9,a,b,1'" in sft.error_of(tmp_path, dtype="uint16")


def test_parts_of_two_tokenizers_are_not_one_corpus(tmp_path):
    for name, sha in (("a", "1" * 64), ("b", "2" * 64), ("c", "1" * 64)):
        folder = sft.write_olmo(tmp_path / name, sft.documents())
        (folder / "prepare.json").write_text(json.dumps({"tokenizer": {"sha256": sha, "eos_token_id": sft.EOS}}))
    message = sft.error_of(f"{tmp_path}/[ab]/token_ids*.npy")
    assert f"{tmp_path}/a" in message and f"is {'1' * 64}, but that of {tmp_path}/b" in message
    corpus = open_corpus(f"{tmp_path}/[ac]/token_ids*.npy")
    assert (corpus.tokenizer_sha256, corpus.eos_token_id, corpus.num_documents) == ("1" * 64, sft.EOS, 80)


def test_a_split_without_metadata_is_reported_if_its_format_has_metadata(tmp_path, caplog):
    shutil.copytree(sft.write_episodes(tmp_path / "e", sft.documents()) / "train", tmp_path / "alone")
    sft.write_olmo(tmp_path / "o", sft.documents())
    (tmp_path / "alone" / "dataset_metadata.json").write_text('{"pad_token_id": 5}')
    with caplog.at_level(logging.WARNING, logger="absl"):
        for path in (tmp_path / "e", tmp_path / "o"):
            open_corpus(path)
        open_corpus(tmp_path / "alone", eos_token_id=sft.EOS)
        assert not caplog.records  # raw corpora of OLMo-core have no metadata
        assert open_corpus(tmp_path / "alone").eos_token_id is None
    (message,) = caplog.messages
    assert all(part in message for part in ("alone: lacks corpus.json and", "with token 5", "give eos_token_id"))


def test_metadata_of_the_parent_folder_apply_to_a_split_only(tmp_path):
    flat = sft.write_episodes(tmp_path / "flat", sft.documents(), split=".", flat=True)
    sft.write_olmo(tmp_path / "train", sft.documents())
    (tmp_path / "dataset_metadata.json").write_text(json.dumps({"eot_token_id": 9}))
    (tmp_path / "prepare.json").write_text(json.dumps({"tokenizer": {"eos_token_id": 9}}))
    assert open_corpus(flat).eos_token_id == sft.EOS
    shutil.copytree(tmp_path / "train", tmp_path / "other")
    for name, expected in (("train", 9), ("other", None)):
        prefix = write_megatron(tmp_path / f"{name}/text", [[[1, 2]]])
        assert open_corpus(prefix).eos_token_id == open_corpus(tmp_path / name, format="olmo").eos_token_id == expected


def test_ids_are_read_from_the_tokenizers_files_and_a_timeout_there_is_an_error(parts, monkeypatch):
    """A host that went on without the ids would pad rows and end documents in another way than the other hosts."""
    (parts / "tokenizer").mkdir()
    added = {"added_tokens": [{"id": sft.EOS, "content": "</s>"}]}
    config = {"eos_token": {"content": "</s>"}, "pad_token": "<p>", "added_tokens_decoder": {"0": {"content": "<p>"}}}
    for name, data in (("tokenizer.json", added), ("tokenizer_config.json", config)):
        (parts / "tokenizer" / name).write_text(json.dumps(data))
    corpus = open_corpus(parts)
    assert (corpus.eos_token_id, corpus.pad_token_id) == (sft.EOS, 0)

    def fail(path, advice=""):
        raise RemoteTimeoutError(f"{path}: not in time")

    monkeypatch.setattr(Json, "load", fail)
    assert "tokenizer.json: not in time" in sft.error_of(parts)


@pytest.mark.parametrize("name", ["{}", "renamed_{}", "{}.bin"])
def test_sidecars_are_found_for_links_to_tokens(parts, tmp_path, name):
    whole = open_corpus(parts, eos_token_id=sft.EOS)
    links = tmp_path / "links"
    links.mkdir()
    for path in sft.tokens_of(parts):
        (links / name.format(path.name)).symlink_to(path)
    for where in [sorted(links.iterdir()), f"{links}/*"] + ([] if name.endswith(".bin") else [links]):
        corpus = open_corpus(where, eos_token_id=sft.EOS)
        assert [shard.loss for shard in corpus.shards] == [shard.loss for shard in whole.shards]
        assert corpus.fingerprint == whole.fingerprint and corpus.num_documents == whole.num_documents
    assert "root" in sft.error_of(links / name.format("token_ids_part_0000.npy"), root=links)


@pytest.mark.parametrize("write", [sft.write_olmo, sft.write_episodes, sft.write_primer])
def test_a_list_and_a_directory_of_corpora_open_as_their_training_splits(tmp_path, write):
    for number, name in enumerate("ab"):
        for split, docs in (("train", sft.documents(seed=number)), ("val", sft.documents(7, seed=number + 2))):
            folder = tmp_path / name / split if write is sft.write_olmo else tmp_path / name
            write(folder, docs, **({"part_tokens": 240} if write is sft.write_olmo else {"split": split}))
    one, other = (open_corpus(tmp_path / name, eos_token_id=sft.EOS).shards for name in "ab")
    places = [[tmp_path / "a", tmp_path / "b"]]
    for where in places if write is not sft.write_olmo else [*places, tmp_path, [tmp_path]]:
        found = open_corpus(where, eos_token_id=sft.EOS).shards
        assert [(shard.path, shard.loss) for shard in found] == [(shard.path, shard.loss) for shard in one + other]
    if write is sft.write_olmo:  # val/ without train/ opens, unless prepare.json shows that train/ is missing
        shutil.rmtree(tmp_path / "b" / "train")
        left = [str(path) for path in sorted(tmp_path.rglob("token_ids_part_*.npy")) if "a/val" not in str(path)]
        assert [shard.path for shard in open_corpus(tmp_path, eos_token_id=sft.EOS).shards] == left
        (tmp_path / "b" / "prepare.json").write_text("{}")
        assert "b: lacks its training split" in sft.error_of(tmp_path)
        assert open_corpus(os.path.relpath(tmp_path / "b" / "val"), format="files").has_loss
