"""Small SFT corpora in each format, written without any of grain_sft's writers."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest

import grain_sft

EOS = 2
NPY_MAGIC = b"\x93NUMPY"


def documents(count=40, seed=0, *, high=1000, weights=False, longest=30):
    """Return `count` random documents (tokens, loss). Each ends with its only EOS; `loss` is bool, or float32 if `weights`."""
    random = np.random.default_rng(seed)
    made = []
    for length in random.integers(2, longest, count):
        tokens = random.integers(3, high, length)
        tokens[-1] = EOS
        loss = random.random(length) < 0.5
        made.append((tokens.astype(np.uint32), (loss * random.random(length)).astype(np.float32) if weights else loss))
    return made


def joined(docs):
    return np.concatenate([tokens for tokens, _ in docs]), np.concatenate([loss for _, loss in docs])


def write_sources(path, docs):
    """Write a source for each document: document `n` is line n + 1 of input n % 3."""
    np.array([[number % 3, number + 1] for number in range(len(docs))], "<i8").tofile(path)


def write_olmo(folder: Path, docs, *, dtype="uint16", part_tokens=100, sources=False):
    """Write a corpus in format olmo, in files of `part_tokens` tokens, which cut through documents."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens, loss = joined(docs)
    ends = np.cumsum([len(each) for each, _ in docs])
    starts = ends - [len(each) for each, _ in docs]
    for number, begin in enumerate(range(0, len(tokens), part_tokens)):
        stop = min(begin + part_tokens, len(tokens))
        tokens[begin:stop].astype(dtype).tofile(folder / f"token_ids_part_{number:04d}.npy")
        loss[begin:stop].astype(bool).tofile(folder / f"labels_mask_part_{number:04d}.npy")
        with gzip.open(folder / f"token_ids_part_{number:04d}.csv.gz", "wt") as file:
            for start, end in zip(starts, ends, strict=True):
                if end > begin and start < stop:
                    file.write(f"{max(start, begin) - begin},{min(end, stop) - begin}\n")
    if sources:
        write_sources(folder / "sources.bin", docs)
    return folder


def tokens_of(folder: Path):
    return sorted(folder.glob("token_ids_part_*.npy"))


def masks_of(folder: Path):
    return sorted(folder.glob("labels_mask_part_*.npy"))


def write_episodes(root: Path, docs, *, split="train", dtype="uint32", shards=1, flat=False, gap=0, metadata=True):
    """Write a corpus in format episodes. Before each episode are `gap` tokens that belong to no episode."""
    root.mkdir(parents=True, exist_ok=True)
    per_shard = -(-len(docs) // shards)
    for number in range(shards):
        folder = root / split if flat else root / split / f"shard_{number:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        some = docs[number * per_shard : (number + 1) * per_shard]
        tokens = [np.append(np.full(gap, 7), each) for each, _ in some]
        loss = [np.append(np.zeros(gap, mask.dtype), mask) for _, mask in some]
        lengths = np.array([len(each) for each, _ in some], np.int64)
        starts = np.cumsum(lengths + gap) - lengths
        np.concatenate([np.empty(0), *tokens]).astype(dtype).tofile(folder / "tokens.bin")
        weights = docs[0][1].dtype == np.float32
        mask = np.concatenate([np.empty(0), *loss])
        mask.astype("f4" if weights else "u1").tofile(folder / ("mask_weighted.bin" if weights else "mask.bin"))
        np.stack([starts, lengths], axis=1).astype("<u8").tofile(folder / "episodes.idx")
    if metadata:
        stated = {"token_dtype": dtype, "eot_token_id": EOS, "pad_token_id": 0, "tokenizer_sha256": "abc"}
        (root / "dataset_metadata.json").write_text(json.dumps(stated))
    return root


def write_primer(root: Path, docs, *, split="train", meta=True, sources=False):
    root.mkdir(parents=True, exist_ok=True)
    tokens, loss = joined(docs)
    lengths = np.array([len(each) for each, _ in docs])
    tokens.astype("<u2").tofile(root / f"{split}_input_ids.bin")
    np.where(loss, tokens, np.int64(-100)).astype("<i4").tofile(root / f"{split}_labels.bin")
    np.save(root / f"{split}_idx.npy", (np.cumsum(lengths) - lengths).astype("<i8"))
    if sources:
        write_sources(root / f"{split}_sources.bin", docs)
    if meta:
        meta = {
            "source": "primer",
            "tokenizer_sha256": "abc",
            "special_token_ids": {"sys": 3, "usr": 4, "asst": 5, "eot": EOS},
            "splits": {split: {"num_examples": len(docs), "num_tokens": len(tokens), "num_shards": 1}},
        }
        (root / "meta.json").write_text(json.dumps(meta))
    return root


def openchat_columns(docs):
    """Return the columns of OpenChat's Parquet file for documents with weights, one document a row."""
    weights = [loss.astype(np.float32) for _, loss in docs]
    pairs = list(zip([tokens for tokens, _ in docs], weights, strict=True))
    return {
        "total_length": [len(tokens) for tokens, _ in docs],
        "num_seqs": [float(each[1:].sum()) for each in weights],
        "seqlens": [[len(tokens)] for tokens, _ in docs],
        "nz_input_ids": [tokens.tolist() for tokens, _ in docs],
        "nz_position_ids": [list(range(len(tokens))) for tokens, _ in docs],
        "nz_shifted_label_ids": [[*np.where(each != 0, tokens, 0)[1:].tolist(), 0] for tokens, each in pairs],
        "nz_shifted_loss_weights": [[*each[1:].tolist(), 0.0] for each in weights],
    }


def write_openchat(root, docs, *, split="train", sources=False, columns=None, first_weights=True, group=7, **options):
    """Write a corpus in format openchat, with `group` rows in a row group."""
    import pyarrow as pa
    from pyarrow import parquet

    root.mkdir(parents=True, exist_ok=True)
    lists = pa.list_(pa.int32())
    types = {"total_length": pa.int32(), "num_seqs": pa.float32(), "nz_shifted_loss_weights": pa.list_(pa.float32())}
    columns = columns or openchat_columns(docs)
    table = pa.table({name: pa.array(values, types.get(name, lists)) for name, values in columns.items()})
    parquet.write_table(table, root / f"openchat.{split}.parquet", row_group_size=group, **options)
    if first_weights:
        np.array([loss[0] for _, loss in docs], "<f4").tofile(root / f"openchat.{split}.first_weights.bin")
    if sources:
        write_sources(root / f"openchat.{split}.sources.bin", docs)
    return root


def npy_bytes(header, data=b"", version=1):
    text = header.encode() if isinstance(header, str) else header
    return NPY_MAGIC + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def error_of(path, **options):
    with pytest.raises(grain_sft.GrainSftError) as error:
        corpus = grain_sft.open_corpus(path, **options)
        _ = corpus.documents, corpus.sources
    return str(error.value)


def assert_documents(corpus, docs, *, sources=False):
    """Check that the corpus has exactly these documents, both in `iter_documents` and in `document(number)`."""
    found = list(corpus.iter_documents())
    assert len(found) == len(docs) == corpus.num_documents == len(corpus.documents)
    for number, (document, (tokens, loss)) in enumerate(zip(found, docs, strict=True)):
        for each in (document, corpus.document(number)):
            np.testing.assert_array_equal(each.tokens, tokens)
            np.testing.assert_array_equal(each.loss, loss)
            assert each.tokens.dtype == np.uint32 and each.loss.dtype == loss.dtype
            assert each.source == ((number % 3, number + 1) if sources else None)


PAD = 0


def make_pairs(count, seed):
    """Return `count` random pairs. A pair is [prompt, chosen, rejected], lists of token ids, some of them empty."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 40, (count, 3)) * (random.random((count, 3)) > 0.05)
    sizes[sizes.sum(axis=1) == 0, 1] = 1
    return [[random.integers(1, 250, size).tolist() for size in row] for row in sizes]


def write_pairs(folder, pairs, shards=2):
    """Write a corpus in format pairs and return its folder. Prompts take no loss."""
    for number, some in enumerate(np.array_split(np.arange(len(pairs)), shards)):
        home = folder / "train" / f"shard_{number:05d}"
        home.mkdir(parents=True)
        tokens, mask, entries = [], [], []
        for pair in (pairs[index] for index in some):
            entries.append([len(tokens), *map(len, pair)])
            for part, ids in enumerate(pair):
                tokens += ids
                mask += [part > 0] * len(ids)
        np.array(tokens, np.uint32).tofile(home / "tokens.bin")
        np.array(mask, np.uint8).tofile(home / "mask.bin")
        np.array(entries, np.uint64).tofile(home / "pairs.idx")
    metadata = {"eot_token_id": 2, "pad_token_id": PAD, "token_dtype": "uint32"}
    (folder / "dataset_metadata.json").write_text(json.dumps(metadata))
    return folder
