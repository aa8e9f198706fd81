"""Layout `megatron_gpt` reads rows from indices that megatron-core and MaxText wrote, and refuses indices that don't fit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from megatron_corpora import KEPT, LENGTH, maxtext_runs, runs, write_prefixes

from grain_sft import GrainSftError, NpyDataSource, open_corpus
from grain_sft.layout import MegatronGptLayout

pytestmark = pytest.mark.usefixtures("own_cache")

RUNS = {system: (runs() | maxtext_runs())[name] for system, name in KEPT.items()}


@pytest.fixture
def index(tmp_path, system):
    """A copy of the golden indices of `system`. The token files are next to this folder."""
    write_prefixes(tmp_path)
    return Path(shutil.copytree(Path(__file__).parents[1] / "golden/megatron_cache" / system, tmp_path / "index"))


def layout_of(index, system, **options):
    run = RUNS[system] | {"sequence_length": LENGTH}
    given = {key: run[key] for key in ("sequence_length", "num_samples", "seed", "variant") if key in run}
    paths = [str(index.parent / each) if isinstance(each, str) else str(each) for each in run["blend"]]
    corpus = open_corpus(paths, format="megatron", eos_token_id=7)
    return MegatronGptLayout(corpus, **given | {"index_dir": index} | options)


def tokens_of(layout):
    return NpyDataSource(layout).read(np.arange(len(layout)))["tokens"]


@pytest.mark.parametrize("system", RUNS)
def test_rows_are_read_from_the_files_of_an_index(index, system, monkeypatch):
    monkeypatch.setenv("HOME", str(index.parent))
    found, built = layout_of(index, system, index_dir="~/index"), layout_of(index, system, index_dir=None)
    expected = tokens_of(built)
    np.testing.assert_array_equal(tokens_of(found), expected)
    assert found.receipt == built.receipt
    if len(built.corpus.shards) > 1:  # the test of blends below changes these
        return
    path = next(index.glob("*shuffle_index.npy"))
    np.save(path, np.load(path)[::-1])  # the samples in reverse order
    again = layout_of(index, system)
    np.testing.assert_array_equal(tokens_of(again), expected[::-1])
    assert again.receipt != built.receipt


def change(kind, at, value):
    """Return a function that sets the entries `at` of the array `kind` of an index, such as "sample", to `value`."""

    def changed(index):
        path = next(index.glob(f"*{kind}_index.npy"))
        array = np.load(path)
        array[at] = value
        np.save(path, array)

    return changed


def change_bytes(change):
    """Return a function that replaces the bytes of the shuffle's file with `change(bytes)`."""

    def changed(index):
        path = next(index.glob("*shuffle_index.npy"))
        path.write_bytes(change(path.read_bytes()))

    return changed


def duplicate_index(index):
    """Copy each file, and check that equal copies are read. Then reverse the shuffle in one copy, so that two indices fit."""
    for path in list(index.iterdir()):
        shutil.copy(path, path.with_name(f"x{path.name}"))
    layout_of(index, "megatron")
    change("shuffle", slice(None), np.load(next(index.glob("*shuffle_index.npy")))[::-1])(index)


WRONG_INDICES = {  # function that damages the index, options of the layout, message
    "document twice": (change("document", 0, 5), {}, "document_index.npy: does not hold each of 60 documents 2 times"),
    "no such document": (change("document", 0, 99), {}, "document_index.npy: does not hold each of 60 documents"),
    "wrong offset": (change("sample", (3, 1), 0), {}, r"sample_index.npy: sample 3 begins at \[\d+, 0\]; expected \["),
    "sample twice": (change("shuffle", 0, 1), {}, "shuffle_index.npy: does not hold sample"),
    "no such sample": (change("shuffle", 0, 10**6), {}, "shuffle_index.npy: holds 0 to 1000000; expected 0 to 147"),
    "cut short": (change_bytes(lambda data: data[:200]), {}, "shuffle_index.npy: can't be read"),
    "damaged header": (change_bytes(lambda data: data.replace(b":", b"#", 2)), {}, "shuffle_index.npy: can't be read"),
    "two indices": (duplicate_index, {}, "each fits .*Keep the one"),
    "other samples": (None, {"num_samples": 400}, "document_index.npy .360.*1 indices have this path and seed"),
    "other length": (None, {"sequence_length": 8}, "no index of"),
    "other seed": (None, {"seed": 5}, "no index of .*0 indices have this path and seed"),
    "no extra token": (None, {"add_extra_token_to_sequence": False}, "(sample_index.npy: sample|no index of)"),
    "remote": (None, {"index_dir": "gs://bucket/index"}, "read from a local folder. Copy it"),
    "empty folder": (lambda index: [path.unlink() for path in index.iterdir()], {}, "holds no .-document_index.npy"),
}


def swap_samples(index):
    """Exchange samples 3 and 4 of a blend. They are of different data sets, so the order of the data sets changes."""
    start = str(min(index.glob("*dataset_index.npy"))).removesuffix("dataset_index.npy")
    for ending in ("dataset_index.npy", "dataset_sample_index.npy"):
        array = np.load(start + ending)
        array[[3, 4]] = array[[4, 3]]
        np.save(start + ending, array)


@pytest.mark.parametrize("system", ["megatron_blend", "maxtext_blend"])
def test_the_blend_of_the_files_decides_the_rows(index, system):
    built = layout_of(index, system, index_dir=None)
    swap_samples(index)
    expected = tokens_of(built)
    expected[[3, 4]] = expected[[4, 3]]
    np.testing.assert_array_equal(tokens_of(layout_of(index, system)), expected)
    for path in index.glob("*dataset*index.npy"):
        path.unlink()
    assert layout_of(index, system).receipt == built.receipt


def duplicate_blend(index):
    """Copy the files of a blend, and change the order of one copy, so that two blends fit."""
    for path in list(index.glob("*dataset*index.npy")):
        shutil.copy(path, path.with_name(f"x{path.name}"))
    swap_samples(index)


def describe_no_weights(index):
    start = str(min(index.glob("*dataset_index.npy"))).removesuffix("dataset_index.npy")
    Path(f"{start}description.txt").write_text(json.dumps({"weights": [0.5, "x"]}))


def describe_no_paths(index):
    next(index.glob("*metadata.json")).write_text(json.dumps({"seed": 3}))


WRONG_BLENDS = {
    "no weights": (describe_no_weights, {}, r"description.txt: can't be read as a description"),
    "no such data set": (change("dataset", 0, 2), {}, "dataset_index.npy: holds 0 to 2; expected 0 to 1"),
    "another count": (change("dataset_sample", 5, 9), {}, "dataset_sample_index.npy: does not count the samples"),
    "two blends": (duplicate_blend, {}, "each fits the weights .*Keep the one"),
}


WRONG = {
    "megatron": WRONG_INDICES,
    "megatron_blend": WRONG_BLENDS,
    "maxtext_blend": WRONG_BLENDS,
    "maxtext": {"no paths": (describe_no_paths, {}, r"metadata\.json: can't be read as a description")},
}


@pytest.mark.parametrize(("system", "name"), [(system, name) for system, cases in WRONG.items() for name in cases])
def test_an_index_or_a_blend_that_does_not_fit_is_an_error(index, system, name):
    damage, options, message = WRONG[system][name]
    if damage is not None:
        damage(index)
    with pytest.raises(GrainSftError, match=f"(?s){message}"):
        layout_of(index, system, **options)
