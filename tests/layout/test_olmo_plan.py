"""`PackedLayout.from_olmo_core` reads packing plans that OLMo-core wrote (tests/golden/olmo_plan, by make_packed_golden.py)."""

import dataclasses
import functools
import gzip
import hashlib
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from batches import golden_values
from packed_corpora import EOS, PLAN_CASE, ROW_DIGITS, write_case
from packed_layouts import open_case, row_digests

from grain_sft import NpyDataSource, PackedLayout, open_corpus
from grain_sft.errors import LayoutError, StorageError

NAMES = ("document-indices", "instance-offsets", "documents-by-instance")


@pytest.fixture
def made(tmp_path):
    """The corpus of the plan, a copy of OLMo-core's work directory, and the names of the token files."""
    written = write_case(PLAN_CASE, tmp_path)
    shutil.copytree(Path(__file__).parents[1] / "golden" / "olmo_plan", tmp_path / "work")
    return open_case(PLAN_CASE, tmp_path, written), tmp_path / "work", [path.name for path in written[0]]


def read(made, *, sequence_length=PLAN_CASE.sequence_length, **changed):
    corpus, work, names = made
    options = {"source_group_size": PLAN_CASE.group, "paths": names, "cache_dir": work / "cache", **changed}
    return PackedLayout.from_olmo_core(corpus, sequence_length, work, **options)


def plan_file(work, name, number=0):
    return sorted((work / "dataset-common").glob(f"{name}-*.npy"))[number]


def spans_of(layout):
    return [layout.spans(row) for row in range(len(layout))]


def documents_of(layout):
    return [[span.document for span in spans] for spans in spans_of(layout)]


def test_rows_are_those_of_the_plan_whatever_cpu_reads_it(made):
    """How numpy sorts documents of equal length depends on the CPU. The golden file has the rows of each kind of CPU."""
    layout = read(made)
    rows = "".join(digest[:ROW_DIGITS] for digest in row_digests(PLAN_CASE, layout)[0])
    assert rows in {found[PLAN_CASE.name]["rows"] for found in golden_values("packed_rows.json")["variants"].values()}
    options = {"source_group_size": PLAN_CASE.group, "boundaries": "eos", "cache_dir": made[1]}
    stable = PackedLayout(made[0], PLAN_CASE.sequence_length, **options)
    assert layout.statistics == stable.statistics
    spans, expected = ({span.document: span for row in spans_of(each) for span in row} for each in (layout, stable))
    assert spans == expected and set(spans) == set(range(layout.statistics["documents"]))


def test_a_pickle_opens_the_same_plan_and_refuses_a_changed_one(made):
    layout = read(made)
    assert "plan='sha256:" in repr(layout)
    path = plan_file(made[1], "documents-by-instance")
    entries = np.fromfile(path, np.uint64)
    entries[:2] = entries[1::-1]  # two documents are exchanged, so this is another valid plan
    entries.tofile(path)
    assert repr(read(made)) != repr(layout)
    data = pickle.dumps(layout)
    again = pickle.loads(data)  # from the cache
    assert repr(again) == repr(layout) and spans_of(again) == spans_of(layout)
    shutil.rmtree(made[1] / "cache")
    with pytest.raises(LayoutError, match="the plan changed after it was opened"):
        pickle.loads(data)
    shutil.rmtree(made[1] / "dataset-common")
    with pytest.raises(StorageError, match=r"document-indices-.*can't be read \(No such file"):
        pickle.loads(data)


NO_SUCH_PLAN = r"(?s)document-indices-.*no such file\..*bytes, sequence_length=.*plans of sequence_length 64\. If"


WRONG_ARGUMENTS = [
    ({"sequence_length": 128}, NO_SUCH_PLAN),
    ({"source_group_size": 1}, NO_SUCH_PLAN),
    ({"long_documents": "fragment"}, NO_SUCH_PLAN),
    ({"paths": None}, NO_SUCH_PLAN),
    ({"use_array_if_local": True}, NO_SUCH_PLAN),
    ({"paths": ["one"]}, "paths: 1; give one for each of the 5 token files"),
    ({"long_documents": "drop"}, "long_documents='drop': expected one of truncate, fragment"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_ARGUMENTS, ids=str)
def test_a_plan_that_does_not_exist_and_wrong_arguments_are_errors(made, changed, message):
    with pytest.raises(LayoutError, match=message):
        read(made, **changed)


def test_a_folder_without_plans_and_a_token_file_with_a_header_are_errors(made, tmp_path):
    corpus, work, names = made
    (tmp_path / "other" / "dataset-common").mkdir(parents=True)
    for folder, message in (("nowhere", "no plan, because it does not exist"), ("other", "no plan")):
        with pytest.raises(LayoutError, match=f"The folder has {message}"):
            read((corpus, tmp_path / folder, names))
    shards = (dataclasses.replace(corpus.shards[0], data_offset=128), *corpus.shards[1:])
    with pytest.raises(LayoutError, match=r"has a \.npy header, which OLMo-core reads as tokens"):
        read((dataclasses.replace(corpus, shards=shards), work, names))


def mutated(seed, array):
    """Return the array with one number changed."""
    random = np.random.default_rng(seed)
    at = int(random.integers(len(array)))
    array[at] = random.choice([0, 1, int(array[at]) + 1, int(array[at]) // 2, int(random.integers(5000)), 2**40, 2**63])
    return array


DAMAGE = {
    "cut": lambda array: array[:-1],
    "empty": lambda array: array[:0],
    "longer": lambda array: np.append(array, array[-2:]),
    "swapped": lambda array: array[[0, 1, 2, 3, 5, 4, *range(6, len(array))]],
    "twice": lambda array: array[[0, 1, 2, 3, 2, 3, *range(6, len(array))]],
    "bytes": lambda array: np.frombuffer(array.tobytes()[:-3], np.uint8),
    **{f"number {seed}": functools.partial(mutated, seed) for seed in range(6)},
}


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_plan_is_refused_or_still_holds_every_document_once(made, name, kind, group):
    path = plan_file(made[1], name, group)
    DAMAGE[kind](np.fromfile(path, np.uint64)).tofile(path)
    try:
        layout = read(made)
    except LayoutError as error:
        assert re.search("dataset-common.*(damaged|cut short|made from other)", str(error))
        return
    assert name == "documents-by-instance" and (kind == "swapped" or "number" in kind)
    documents = [document for row in documents_of(layout) for document in row]
    assert sorted(documents) == list(range(len(documents)))
    assert layout.statistics["dropped_documents"] == 0


def test_a_plan_of_other_tokens_is_refused(made, tmp_path):
    corpus, work, names = made
    path = corpus.shards[2].path
    tokens = np.fromfile(path, PLAN_CASE.dtype)
    first = int(np.flatnonzero(tokens == EOS)[3])
    tokens[[first, first - 1]] = tokens[[first - 1, first]]  # the size stays, but a document ends one token earlier
    tokens.tofile(path)
    for eos, wrong in ((EOS, "expected a document, or the part of a document.*"), (7, "")):
        changed = open_corpus(tmp_path, dtype=PLAN_CASE.dtype, eos_token_id=eos)
        with pytest.raises(LayoutError, match=rf"{wrong}made from other tokens, or with another EOS"):
            read((changed, work, names))


def write_plan(folder, hashed, length, documents, rows):
    """Write a plan as OLMo-core does: the file names contain the hash of the text `hashed`."""
    found = hashlib.sha256(hashed.encode()).hexdigest()
    (folder / "dataset-common").mkdir(parents=True, exist_ok=True)
    ends = np.cumsum([len(row) for row in rows])
    offsets = np.stack([ends - [len(row) for row in rows], ends], 1)
    for name, array in zip(NAMES, (documents, offsets, np.concatenate(rows)), strict=True):
        np.asarray(array, np.uint64).tofile(folder / "dataset-common" / f"{name}-{length}-{found}.npy")


@pytest.mark.parametrize("url", [False, True])
def test_a_plan_made_with_boundary_files_ends_a_document_with_each_part(tmp_path, monkeypatch, url):
    """OLMo-core reads boundary files in a bucket, or with `use_array_if_local=False`. Each part ends a document, BOS or not."""
    tokens = np.array([5, 6, EOS, 7, 8, 9, 10, 11, EOS, 12, 13, EOS], np.uint16)
    hashes = []
    for number, part in enumerate(np.split(tokens, 2)):
        stem = tmp_path / f"token_ids_part_{number:04d}"
        part.tofile(f"{stem}.npy")
        np.ones(6, np.bool_).tofile(tmp_path / f"labels_mask_part_{number:04d}.npy")
        data = gzip.compress(b"0,3\n3,6\n")
        Path(f"{stem}.csv.gz").write_bytes(data)
        hashes.append(hashlib.sha256(data).hexdigest())
    paths = [f"{'gs://bucket' if url else tmp_path}/token_ids_part_{number:04d}.npy" for number in range(2)]
    hashed = "".join(f"{path}12" for path in paths) + "truncateuint64" + ("" if url else "use_array_if_local=False")
    hashed += "".join(f"metadata={path},sha256={digest}" for path, digest in zip(paths, hashes, strict=True))
    write_plan(tmp_path, hashed, 8, [[0, 3], [3, 6], [6, 9], [9, 12]], [[2, 1], [0, 3]])
    corpus = open_corpus(tmp_path, eos_token_id=EOS)
    assert corpus.documents.length.tolist() == [3, 6, 3]
    options = {"source_group_size": 2, "paths": paths, "use_array_if_local": None if url else False, "bos_token_id": 3}
    monkeypatch.setenv("HOME", str(tmp_path))
    layout = PackedLayout.from_olmo_core(corpus, 8, "~", cache_dir=tmp_path / "cache", **options)
    rows = NpyDataSource(layout).read(range(2))
    assert rows["tokens"][:, :6].tolist() == [[10, 11, EOS, 7, 8, 9], [5, 6, EOS, 12, 13, EOS]]
    assert rows["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]] * 2
    assert documents_of(layout) == [[1, 1], [0, 2]]
    expected = {"documents": 3, "dropped_documents": 0, "cut_documents": 0, "cut_tokens": 0}
    assert layout.statistics | expected == layout.statistics


def test_a_plan_of_fragments_that_lacks_or_repeats_tokens_is_refused(tmp_path):
    np.array([5, 6, 7, 8, 9, 10, EOS, 4, EOS], np.uint16).tofile(tmp_path / "a.npy")
    corpus = open_corpus(tmp_path / "a.npy", dtype="uint16", eos_token_id=EOS)
    options = {"long_documents": "fragment", "cache_dir": tmp_path / "cache"}

    def read_back(documents):
        rows = [[number] for number in range(len(documents))]
        write_plan(tmp_path, f"{corpus.shards[0].path}18fragmentuint64", 4, documents, rows)
        return PackedLayout.from_olmo_core(corpus, 4, tmp_path, **options)

    assert documents_of(read_back([[0, 4], [4, 7], [7, 9]])) == [[0], [0], [1]]
    for documents, message in (
        ([[0, 4], [4, 7]], "has document 1 in 0 pieces; expected 1"),
        ([[0, 4], [7, 9]], "has document 0 in 1 pieces; expected 2"),
        ([[0, 4], [5, 7], [7, 9]], "begins at token 5 .*before token 7; expected a document"),
        ([[0, 3], [3, 7], [7, 9]], "begins at token 0 .*before token 3; expected a document"),
        ([[0, 4], [4, 7], [7, 9], [0, 4]], "has document 0 in 3 pieces"),
        ([[0, 4], [0, 4], [7, 9]], "has document 0 in 2 pieces; expected 2 different pieces"),
    ):
        with pytest.raises(LayoutError, match=message):
            read_back(documents)
