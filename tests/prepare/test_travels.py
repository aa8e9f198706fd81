"""Each split of a corpus carries the metadata that it needs, and a tokenizer other than the corpus's own is refused."""

import json
import shutil
from pathlib import Path

import batches
import numpy as np
import pytest
from batches import load, sections, write_config
from prepared import CHAT_FORMATS, make_each_format, save_trained
from sft_files import error_of

import grain_sft
from grain_sft.cli.prepare import print_summary
from grain_sft.errors import CorpusError, PrepareError
from grain_sft.prepare import convert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with chats, a corpus of them in each format, their tokenizer spm.model, and another one, other.model."""
    path = make_each_format(tmp_path_factory.mktemp("travels"), {"chats.jsonl": 60})
    save_trained(path / "other", size=310).rename(path / "other.model")
    return path


def stated(corpus: grain_sft.Corpus) -> dict:
    """Return the metadata that a split must carry."""
    return {name: getattr(corpus, name) for name in ("eos_token_id", "pad_token_id", "tokenizer_sha256")}


def config_of(corpus: Path | str, **options: str) -> dict:
    return sections(corpus, 64, layout="padded", corpus=options)


@pytest.mark.parametrize("form", CHAT_FORMATS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_that_is_copied_alone_keeps_tokenizer_and_ids(folder, tmp_path, form, split, caplog):
    name, copy = split, shutil.copytree  # copies files in place of links to them
    if form == "openchat":
        name, copy = f"openchat.{'eval' if split == 'val' else 'train'}.parquet", shutil.copy
    whole = grain_sft.open_corpus(folder / form / name)
    alone = grain_sft.open_corpus(copy(folder / form / name, tmp_path / name))
    assert stated(alone) == stated(whole) and None not in (alone.eos_token_id, alone.tokenizer_sha256)
    assert alone.tokenizer == (str(folder / "spm.model") if form != "openchat" else "spm.model")
    assert whole.tokenizer == str(folder / "spm.model")
    assert alone.fingerprint == whole.fingerprint and not caplog.records
    if form != "openchat":
        assert alone.source_names == whole.source_names == (str(folder / "chats.jsonl"),)
    for one, other in zip(alone.iter_documents(), whole.iter_documents(), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.loss, other.loss)


@pytest.mark.parametrize("form", ["olmo", "episodes"])
def test_metadata_of_a_split_override_those_of_the_folder_above(folder, tmp_path, form):
    """A split that was copied into another corpus's folder keeps its ids.

    Version 0.1.0 wrote no corpus.json: an olmo split of that version has its ids in dataset_statistics.json.
    """
    train = shutil.copytree(folder / form / "train", tmp_path / "train")
    (tmp_path / "prepare.json").write_text(json.dumps({"tokenizer": {"eos_token_id": 9, "sha256": "of another"}}))
    assert stated(grain_sft.open_corpus(tmp_path)) == stated(grain_sft.open_corpus(folder / form))
    if form == "olmo":
        (tmp_path / "prepare.json").unlink()
        (train / "corpus.json").unlink()
        assert stated(grain_sft.open_corpus(train)) == stated(grain_sft.open_corpus(folder / form))


def test_converted_corpora_carry_their_metadata_too(folder, tmp_path):
    convert(folder / "olmo", tmp_path / "out", "episodes")
    shutil.copytree(tmp_path / "out" / "val", tmp_path / "alone")
    alone = grain_sft.open_corpus(tmp_path / "alone")
    assert alone.tokenizer_sha256 == grain_sft.open_corpus(folder / "olmo").tokenizer_sha256
    assert (alone.tokenizer, alone.source_names) == (str(folder / "spm.model"), (str(folder / "chats.jsonl"),))
    with pytest.raises(CorpusError, match="was made with the tokenizer"):
        convert(folder / "olmo", tmp_path / "other", "episodes", tokenizer=str(folder / "other.model"))


def test_a_split_without_its_manifest_is_converted_with_its_own_source_names(folder, tmp_path):
    train = shutil.copytree(folder / "olmo" / "train", tmp_path / "train")
    assert convert(train, tmp_path / "out", "episodes")["inputs"] == [{"path": str(folder / "chats.jsonl")}]
    (train / "prepare.json").write_text("{")
    with pytest.raises(PrepareError, match=r"prepare\.json: damaged"):
        convert(train, tmp_path / "other", "episodes")


def test_a_val_split_of_another_preparation_keeps_its_own_sources(folder, tmp_path):
    metadata = json.loads((folder / "episodes/val/corpus.json").read_text())
    shutil.copytree(folder / "episodes", tmp_path / "in")
    (tmp_path / "in/val/corpus.json").write_text(json.dumps({**metadata, "source_names": ["other.jsonl"]}))
    convert(tmp_path / "in", tmp_path / "out", "olmo")
    train, val = (grain_sft.open_corpus(tmp_path / "out" / split) for split in ("train", "val"))
    assert train.source_names == val.source_names == (str(folder / "chats.jsonl"), "other.jsonl")
    assert set(train.sources[:, 0]) == {0} and set(val.sources[:, 0]) == {1} and train.dtype == "uint16"


def test_damaged_metadata_of_a_split_are_named(folder, tmp_path):
    path = shutil.copytree(folder / "olmo" / "train", tmp_path / "train") / "corpus.json"
    metadata = json.loads(path.read_text())
    for change, expected in (
        ({"version": 2}, "version 2; expected 1"),
        ({"eos_token_id": "x"}, "Expected `int | null`, got `str`"),
        ({"source_names": [1]}, "source_names"),
    ):
        path.write_text(json.dumps({**metadata, **change}))
        assert expected in error_of(tmp_path / "train")
    for of_another_tool in ('{"format": "of another tool"}', '{"text": "a"}\n{"text": "b"}\n', "[1]"):
        path.write_text(of_another_tool)
        assert grain_sft.open_corpus(tmp_path / "train").tokenizer_sha256 == metadata["tokenizer_sha256"]


@pytest.mark.parametrize("form", CHAT_FORMATS)
@pytest.mark.parametrize("where_from", ["open", "config", "index"])
def test_a_tokenizer_other_than_that_of_the_corpus_is_refused(folder, tmp_path, form, where_from):
    corpus = grain_sft.open_corpus(folder / form)
    where = str(tmp_path / "index.json" if where_from == "index" else folder / form)
    if where_from == "index":
        corpus.save(where)

    def open_with(tokenizer: str) -> grain_sft.Corpus:
        if where_from != "config":
            return grain_sft.open_corpus(where, tokenizer=tokenizer)
        return load(config_of(where, tokenizer=tokenizer)).source.layout.corpus

    shutil.copy(folder / "spm.model", tmp_path / "renamed.model")
    for right in (folder / "spm.model", folder / form / "tokenizer", tmp_path / "renamed.model", "spm.model"):
        assert open_with(str(right)).fingerprint == corpus.fingerprint
    for wrong in (str(folder / "other.model"), "gpt2", "org/spm.model"):
        with pytest.raises(CorpusError, match="the corpus was made with the tokenizer") as error:
            open_with(wrong)
        assert wrong in str(error.value) and "spm.model" in str(error.value)


def test_a_tokenizer_beside_the_config_is_compared_by_its_hash(folder, tmp_path):
    run = write_config(tmp_path / "c" / "run.json", config_of(folder / "olmo", tokenizer="spm.model"))
    shutil.copy(folder / "other.model", run.with_name("spm.model"))
    assert "the corpus was made with the tokenizer" in batches.error_of(run)


def test_the_name_of_a_tokenizer_is_refused_if_the_corpus_has_only_a_hash(tmp_path, folder):
    shutil.copytree(folder / "episodes", tmp_path / "seed")
    for path in ("prepare.json", "train/corpus.json", "tokenizer"):
        target = tmp_path / "seed" / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    assert grain_sft.open_corpus(tmp_path / "seed").tokenizer is None
    assert "but not its name" in error_of(tmp_path / "seed", tokenizer="gpt2")
    grain_sft.open_corpus(tmp_path / "seed", tokenizer=str(folder / "spm.model"))
    assert "the corpus was made with the tokenizer sha256" in error_of(tmp_path / "seed", tokenizer=str(folder / "other.model"))


def test_commands_refuse_another_tokenizer(folder, tmp_path, run_command):
    run = write_config(tmp_path / "run.json", config_of(folder / "olmo"))
    for command in (
        f"verify {folder}/olmo --tokenizer-name",
        f"index {folder}/olmo --tokenizer-name",
        f"inspect {run} --step 0 --tokenizer",
        f"trace {run} --find question --tokenizer",
        f"report {run} --seconds 0 --output {tmp_path}/r.html --tokenizer",
    ):
        printed = run_command(*command.split(), folder / "other.model", status=1)
        assert "made with" in printed.out + printed.err, command
    run_command("verify", f"{folder}/olmo", "--tokenizer-name", folder / "spm.model")


def test_documents_that_olmo_core_does_not_find_are_noted_unless_the_template_is_the_reason(capsys):
    """OLMo-core finds documents by EOS, so a document without a final EOS, or with an inner one, is noted.

    If at least half of the documents are like this, the template is the reason, and no note is printed.
    """
    counts = {"documents": 100, "tokens": 5, "trainable_tokens": 1, "truncated": 0}
    manifest = {"format": "olmo", "splits": {"train": counts}, "dropped": {}, "rejected": 0}
    for number, noted in ((0, False), (1, True), (49, True), (50, False), (100, False), (None, False)):
        for key in ("without_final_eos", "with_inner_eos"):
            print_summary({**manifest, key: number}, "out")
            assert (f"note     {number} of 100 documents" in capsys.readouterr().out) is noted
    print_summary({**manifest, "text": {"bytes": 9, "tokens": 5}, "without_final_eos": 100}, "out")
    assert "note     100 of 100 documents" in capsys.readouterr().out  # plain documents: a template is never the reason
