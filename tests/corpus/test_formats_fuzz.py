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

from grain_sft import GrainSftError, NpyDataSource, WindowLayout, open_corpus

SETTINGS = settings(max_examples=examples(400), deadline=None, derandomize=True, database=None)
EVERY_FORMAT = pytest.mark.parametrize("name", ["olmo", "episodes", "primer", "openchat"])


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A whole corpus of every format."""
    root = tmp_path_factory.mktemp("whole")
    docs, weighted = documents(12), documents(12, weights=True)
    write_olmo(root / "olmo", docs, part_tokens=60, sources=True)
    write_episodes(root / "episodes", weighted, shards=2)
    write_primer(root / "primer", docs, sources=True)
    write_openchat(root / "openchat", weighted, sources=True)
    tokenizer = {"eos_token_id": EOS, "pad_token_id": 0, "sha256": "abc"}
    prepare = {"tokenizer": tokenizer, "inputs": [{"path": "a.jsonl"}], "splits": {"train": {}}}
    written = {f"{name}/prepare.json": prepare for name in ("olmo", "episodes", "primer", "openchat")}
    written["olmo/dataset_statistics.json"] = {"configuration": {"token_dtype": "uint16"}}
    eos = {"content": "<e>"}
    written["olmo/tokenizer/tokenizer_config.json"] = {"eos_token": eos, "added_tokens_decoder": {str(EOS): eos}}
    (root / "olmo" / "tokenizer").mkdir()
    for name, data in written.items():
        (root / name).write_text(json.dumps(data))
    return root


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def use(path):
    """Open and read everything, in every way; return whether nothing was refused."""
    try:
        corpus = open_corpus(path)
        found = list(corpus.iter_documents())
        assert len(found) == corpus.num_documents == len(corpus.documents)
        for number, document in enumerate(found):
            assert len(document.tokens) == len(document.loss) == corpus.documents.length[number]
            np.testing.assert_array_equal(corpus.document(number).tokens, document.tokens)
        assert corpus.sources is None or corpus.sources.shape == (len(found), 2)
        batch = NpyDataSource(WindowLayout(corpus, 4)).read([0, -1])
        assert batch["loss_mask"].dtype == np.bool_ and batch["loss_mask"].shape == (2, 4)
        assert np.isfinite(batch.get("loss_weights", 0)).all()
        corpus.save(path / "saved-index")
        assert open_corpus(path / "saved-index", format="index") == corpus
    except GrainSftError as error:
        assert str(path) in str(error) or "leaves no row" in str(error) or "a token id of" in str(error)
        return False
    return True


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@EVERY_FORMAT
def test_a_mutated_file_is_an_error_or_read(corpora, name, tmp_path_factory):
    folder, whole = tmp_path_factory.mktemp("mutated") / name, files_of(corpora / name)
    assert use(shutil.copytree(corpora / name, folder))

    @SETTINGS
    @given(path=st.sampled_from(whole), mutations=Mutations, reach=st.sampled_from([None, 16, 200]))
    def check(path, mutations, reach):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(corpora / name, folder)
        (folder / path).write_bytes(mutate((folder / path).read_bytes(), mutations, reach))
        use(folder)

    check()


@EVERY_FORMAT
@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "random"])
def test_a_missing_or_emptied_file_is_an_error_or_read(corpora, name, kind, tmp_path):
    for number, path in enumerate(files_of(corpora / name)):
        folder = shutil.copytree(corpora / name, tmp_path / str(number))
        (folder / path).unlink()
        if kind == "folder":
            (folder / path).mkdir()
        elif kind != "missing":
            (folder / path).write_bytes(b"" if kind == "empty" else np.random.default_rng(number).bytes(1000))
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
def test_metadata_with_any_value_is_an_error_or_read(corpora, name, file, tmp_path_factory):
    folder = shutil.copytree(corpora / name, tmp_path_factory.mktemp(name) / name)
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
        data = {"": json.loads(json.dumps(whole))}
        inner, *keys = data, "", *place
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        path.write_text(json.dumps(data[""]))
        use(folder)

    check()
