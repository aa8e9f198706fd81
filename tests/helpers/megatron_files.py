"""Small Megatron corpora, written without grain_sft's writer, and those that megatron-core wrote (tests/golden/megatron)."""

import json
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron"
CASES = json.loads((GOLDEN / "corpora.json").read_text())["cases"]
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(prefix: Path, docs, dtype="int32", *, entries=True, **changed) -> str:
    """Write documents, each a list of token sequences, to `prefix`.idx and `prefix`.bin; return the prefix.

    If `entries`, the header has the number of entries of the document index, as megatron-core's header has. Otherwise, it has
    the number of documents. `changed` replaces values of `parts`.
    """
    sequences = [sequence for document in docs for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    tokens = np.concatenate([np.empty(0, dtype), *(np.array(sequence, dtype) for sequence in sequences)], dtype=dtype)
    parts = {"magic": b"MMIDIDX\0\0", "version": 1, "code": CODES[dtype], "sizes": sizes, "tail": b""}
    parts["pointers"] = (np.cumsum(sizes, dtype=np.int64) - sizes) * tokens.itemsize
    parts["borders"] = np.cumsum([0, *map(len, docs)])
    parts |= changed
    header = b"".join(number.to_bytes(8, "little") for number in (len(sizes), len(docs) + entries))
    stated = parts["magic"] + parts["version"].to_bytes(8, "little") + bytes([parts["code"]]) + header
    arrays = [np.asarray(parts[name]).astype(kind).tobytes() for name, kind in ARRAYS]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.idx").write_bytes(stated + b"".join(arrays) + parts["tail"])
    tokens.tofile(f"{prefix}.bin")
    return str(prefix)


ARRAYS = (("sizes", "<i4"), ("pointers", "<i8"), ("borders", "<i8"))
