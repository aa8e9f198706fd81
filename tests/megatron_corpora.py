"""Megatron prefixes of made-up documents, and the runs over them that golden files hold. Makers of golden files use it too."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

EOD, PAD = 7, 0
LENGTH = 16
_HEADER = b"MMIDIDX\0\0" + (1).to_bytes(8, "little")
_CODES = {"uint8": 1, "int32": 4, "uint16": 8}

PREFIXES = {
    "a": {"documents": 60, "seed": 1},
    "b": {"documents": 25, "seed": 2, "longest": 90},
    "c": {"documents": 7, "seed": 3, "dtype": "int32"},
    "sentences": {"documents": 20, "seed": 4, "sequences": 4},
    "d": {"documents": 40, "seed": 5, "longest": 5},
}
"""Prefixes: `sentences` has several sequences a document, some of them empty."""


def write_prefix(
    folder: Path,
    name: str,
    documents: int,
    seed: int,
    *,
    sequences: int = 1,
    longest: int = 40,
    dtype: str = "uint16",
) -> Path:
    """Write `name`.bin and `name`.idx, and return the prefix. Three of four documents end with `EOD`."""
    random = np.random.default_rng(seed)
    counts = random.integers(1, sequences + 1, documents)
    sizes = random.integers(1, longest, counts.sum()).astype(np.int32)
    if sequences > 1:
        sizes[random.random(len(sizes)) < 0.2] = 0
        sizes[-1] = 5
    tokens = random.integers(8, 200, sizes.sum()).astype(dtype)
    borders = np.append(0, counts.cumsum())
    ends = sizes.cumsum(dtype=np.int64)[borders[1:] - 1]
    tokens[ends[random.random(documents) < 0.75] - 1] = EOD
    tokens[random.random(len(tokens)) < 0.01] = EOD
    pointers = (np.append(0, sizes.cumsum(dtype=np.int64)[:-1])) * tokens.itemsize
    folder.mkdir(parents=True, exist_ok=True)
    counted = len(sizes).to_bytes(8, "little") + len(borders).to_bytes(8, "little")
    arrays = sizes.astype("<i4"), pointers.astype("<i8"), borders.astype("<i8")
    data = _HEADER + bytes([_CODES[dtype]]) + counted + b"".join(array.tobytes() for array in arrays)
    (folder / f"{name}.idx").write_bytes(data)
    tokens.tofile(folder / f"{name}.bin")
    return folder / name


def write_prefixes(folder: Path) -> None:
    """Write all `PREFIXES` to a folder."""
    for name, options in PREFIXES.items():
        write_prefix(folder, name, **options)


def runs() -> dict[str, dict[str, Any]]:
    """Return runs by name.

    Their keys: `blend`, prefixes or weights and prefixes in turn; `split` and `subset`; `num_samples`; and options of the
    layout.
    """
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, **options: Any) -> None:
        found[name] = {"blend": ["a"], "split": "1,0,0", "subset": "train", "num_samples": None, **options}

    for seed, samples in itertools.product((1234, 0), (None, 1, 60, 74, 75, 90, 130, 140, 150, 320)):
        add(f"seed {seed}, {samples} samples", seed=seed, num_samples=samples)
    for samples in (None, 50, 100, 141, 300):
        add(f"no extra token, {samples} samples", num_samples=samples, add_extra_token_to_sequence=False)
    for split, subset in itertools.product(("969,30,1", "80,10,10", "1,1,1"), ("train", "valid", "test")):
        if (split, subset) != ("969,30,1", "test"):
            add(f"split {split}, {subset}", blend=["d"], split=split, subset=subset, num_samples=20, seed=5)
    for partial, extra in itertools.product((None, 1, 40), (True, False)):
        options = {"add_extra_token_to_sequence": extra, "drop_last_partial_sequence": False}
        add(f"partial {partial}, {extra}", split="0,1,0", subset="valid", num_samples=partial, **options)
    for mask, attention, positions in itertools.product((False, True), repeat=3):
        options = {"eod_mask_loss": mask, "reset_attention_mask": attention, "reset_position_ids": positions}
        add(f"eod {mask}, {attention}, {positions}", num_samples=100, **options)
    for samples in (None, 40, 500):
        add(f"sentences, {samples} samples", blend=["sentences"], num_samples=samples)
        add(
            f"sequences of {LENGTH * 3}, {samples} samples",
            blend=["b"],
            num_samples=samples,
            sequence_length=LENGTH * 3,
        )
    blends = {
        "two": [0.3, "a", 0.7, "b"],
        "three": [1, "a", 1, "b", 1, "d"],
        "four": [0.5, "b", 0.25, "a", 0.2, "sentences", 0.05, "d"],
        "one": [2.5, "a"],
        "uneven": [1e-3, "d", 7, "a", 3, "b"],
    }
    for (name, blend), samples in itertools.product(blends.items(), (1, 57, 400)):
        add(f"blend of {name}, {samples} samples", blend=blend, num_samples=samples)
    add("blend, split", blend=blends["four"], num_samples=90, split="80,10,10", subset="valid", seed=3)
    for samples in (None, 30, 10**6):
        add(f"by sizes, {samples} samples", blend=["a", "b", "d"], num_samples=samples)
    return found
