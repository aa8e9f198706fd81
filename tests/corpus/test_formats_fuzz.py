"""Damaged SFT corpora, at random: a GrainSftError that names a file, or arrays that fit together; nothing else."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sft_files import EOS, documents, write_episodes, write_olmo, write_openchat, write_primer
from test_fuzz import Mutations, json_values, mutate

import grain_sft

SETTINGS = settings(max_examples=examples(400), deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A whole corpus of every format, and the paths of its files."""
    root = tmp_path_factory.mktemp("whole")
    docs, weighted = documents(12), documents(12, weights=True)
    write_olmo(root / "olmo", docs, part_tokens=60, sources=True)
    statistics = {"configuration": {"token_dtype": "uint16"}}
    (root / "olmo" / "dataset_statistics.json").write_text(json.dumps(statistics))
    (root / "olmo" / "tokenizer").mkdir()
    config = {"eos_token": {"content": "<e>"}, "added_tokens_decoder": {str(EOS): {"content": "<e>"}}}
    (root / "olmo" / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    write_episodes(root / "episodes", weighted, shards=2)
    write_primer(root / "primer", docs, sources=True)
    write_openchat(root / "openchat", weighted, sources=True)
    for name in ("olmo", "episodes", "primer", "openchat"):
        prepare = {
            "tokenizer": {"eos_token_id": EOS, "pad_token_id": 0, "sha256": "abc"},
            "inputs": [{"path": "a.jsonl"}],
            "splits": {"train": {}},
        }
        (root / name / "prepare.json").write_text(json.dumps(prepare))
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def use(path):
    """Open and read everything, in every way."""
    try:
        corpus = grain_sft.open_corpus(path)
        found = list(corpus.iter_documents())
        assert len(found) == corpus.num_documents == len(corpus.documents)
        for number, document in enumerate(found):
            assert len(document.tokens) == len(document.loss) == corpus.documents.length[number]
            np.testing.assert_array_equal(corpus.document(number).tokens, document.tokens)
        assert corpus.sources is None or corpus.sources.shape == (len(found), 2)
        batch = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 4)).read([0, -1])
        assert batch["loss_mask"].dtype == np.bool_ and batch["loss_mask"].shape == (2, 4)
        if "loss_weights" in batch:
            assert np.isfinite(batch["loss_weights"]).all()
        corpus.save(path / "saved-index")
        assert grain_sft.open_corpus(path / "saved-index", format="index") == corpus
    except grain_sft.GrainSftError as error:
        assert str(path) in str(error) or "leaves no row" in str(error) or "a token id of" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", ["olmo", "episodes", "primer", "openchat"])
def test_undamaged_corpora_are_read(corpora, cache, name, tmp_path):
    shutil.copytree(corpora / name, tmp_path / name)
    assert use(tmp_path / name)


@pytest.mark.parametrize("name", ["olmo", "episodes", "primer", "openchat"])
def test_a_mutated_file_is_an_error_or_read(corpora, cache, name, tmp_path_factory):
    whole = sorted(path.relative_to(corpora / name) for path in (corpora / name).rglob("*") if path.is_file())

    @SETTINGS
    @given(which=st.integers(0, len(whole) - 1), mutations=Mutations, reach=st.sampled_from([None, 16, 200]))
    def check(which, mutations, reach):
        folder = tmp_path_factory.getbasetemp() / f"mutated-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(corpora / name, folder)
        path = folder / whole[which]
        path.write_bytes(mutate(path.read_bytes(), mutations, reach))
        use(folder)

    check()


@pytest.mark.parametrize("name", ["olmo", "episodes", "primer", "openchat"])
def test_a_missing_or_emptied_file_is_an_error_or_read(corpora, cache, name, tmp_path):
    whole = sorted(path.relative_to(corpora / name) for path in (corpora / name).rglob("*") if path.is_file())
    for number, path in enumerate(whole):
        for kind in ("missing", "empty", "folder", "random"):
            folder = tmp_path / f"{number}-{kind}"
            shutil.copytree(corpora / name, folder)
            if kind == "empty":
                (folder / path).write_bytes(b"")
            elif kind == "random":
                (folder / path).write_bytes(np.random.default_rng(number).bytes(1000))
            else:
                (folder / path).unlink()
            if kind == "folder":
                (folder / path).mkdir()
            use(folder)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("olmo", "prepare.json"),
        ("olmo", "dataset_statistics.json"),
        ("olmo", "tokenizer/tokenizer_config.json"),
        ("episodes", "dataset_metadata.json"),
        ("primer", "meta.json"),
    ],
)
def test_metadata_with_any_value_is_an_error_or_read(corpora, cache, name, file, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name) / name
    shutil.copytree(corpora / name, folder)
    path = folder / file
    if file != "prepare.json":
        (folder / "prepare.json").unlink()
    whole = json.loads(path.read_text())
    places = [()]
    for key, value in whole.items():
        places += [(key,), *([(key, inner) for inner in value] if isinstance(value, dict) else [])]

    @SETTINGS
    @given(place=st.sampled_from(places), value=json_values)
    def check(place, value):
        data = json.loads(json.dumps(whole))
        if place:
            inner = data
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
        else:
            data = value
        path.write_text(json.dumps(data))
        use(folder)

    check()


@pytest.mark.parametrize("name", ["olmo", "episodes", "primer"])
def test_a_mutated_index_of_an_sft_corpus_is_right_or_an_error(corpora, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp(name)
    corpus = grain_sft.open_corpus(corpora / name)
    corpus.save(folder / "whole.json")
    whole = (folder / "whole.json").read_bytes()

    @SETTINGS
    @given(mutations=Mutations)
    def check(mutations):
        path = folder / "mutated.json"
        path.write_bytes(mutate(whole, mutations))
        try:
            found = grain_sft.open_corpus(path)
            assert found.num_tokens == corpus.num_tokens
            np.testing.assert_array_equal(found.documents.start, corpus.documents.start)
            _ = found.sources
            for key, array in grain_sft.NpyDataSource(grain_sft.WindowLayout(found, 10)).read(range(5)).items():
                source = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 10))
                np.testing.assert_array_equal(array, source.read(range(5))[key])
        except grain_sft.GrainSftError:
            pass

    check()
