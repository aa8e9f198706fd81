"""Megatron files of random documents, and runs over them. A prefix is the path of a .bin and an .idx file, without suffix.

The files are written without grain_sft's writer, or by megatron-core (tests/golden/megatron).
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

EOD, PAD = 7, 0
LENGTH = 16
FEW = 400
"""Golden files have at most this number of samples of a run."""

PREFIXES = {
    "a": {"documents": 60, "seed": 1},
    "b": {"documents": 25, "seed": 2, "longest": 90},
    "c": {"documents": 7, "seed": 3},
    "sentences": {"documents": 20, "seed": 4, "sequences": 4},
    "d": {"documents": 40, "seed": 5, "longest": 5},
}
"""Arguments of `write_prefix`. Documents of "sentences" have up to four sequences each, some of them empty."""


def write_prefix(folder: Path, name: str, documents: int, seed: int, *, sequences: int = 1, longest: int = 40) -> Path:
    """Write `name`.bin and `name`.idx, and return the prefix. Three of four documents end with `EOD`."""
    random = np.random.default_rng(seed)
    counts = random.integers(1, sequences + 1, documents)
    sizes = random.integers(1, longest, counts.sum()).astype(np.int32)
    if sequences > 1:
        sizes[random.random(len(sizes)) < 0.2] = 0
        sizes[-1] = 5
    tokens = random.integers(8, 200, sizes.sum()).astype("<u2")
    borders = np.append(0, counts.cumsum())
    ends = sizes.cumsum(dtype=np.int64)[borders[1:] - 1]
    tokens[ends[random.random(documents) < 0.75] - 1] = EOD
    tokens[random.random(len(tokens)) < 0.01] = EOD
    in_order = np.split(tokens, sizes.cumsum()[:-1])
    whole = [in_order[start:stop] for start, stop in itertools.pairwise(borders.tolist())]
    return Path(write_megatron(folder / name, whole, "uint16"))


def write_prefixes(folder: Path) -> None:
    for name, options in PREFIXES.items():
        write_prefix(folder, name, **options)


def runs() -> dict[str, dict[str, Any]]:
    """Return the options of each run of megatron-core, by name. A `blend` has prefixes, or weights and prefixes in turn."""
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
        options = {"blend": ["b"], "num_samples": samples, "sequence_length": LENGTH * 3}
        add(f"sequences of {LENGTH * 3}, {samples} samples", **options)
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


def oversampled_runs() -> dict[str, dict[str, Any]]:
    """Return runs of blends as `runs` does. In some, a prefix has too few samples, because the run's `surplus` is small."""
    found = {}
    for blend, samples in (([5, "b", 6, "a", 2, "d", 16, "c"], 210), ([2, "c", 3, "b", 14, "a", 18, "d"], 186)):
        for more, surplus in itertools.product(range(-2, 3), (0.0, 0.005, 0.05)):
            options = {"blend": blend, "split": "1,0,0", "subset": "train", "sequence_length": 50, "surplus": surplus}
            found[f"{blend[0]}, {samples + more} samples, {surplus}"] = {**options, "num_samples": samples + more}
    return found


KEPT = {"megatron": "seed 1234, 90 samples", "megatron_blend": "blend of two, 57 samples"}
KEPT |= {"maxtext": "seed 3, 130 samples", "maxtext_blend": "blend, 50 samples"}
"""Names of runs whose index files are golden, by their folder in `golden/megatron_cache`."""

BLENDS: dict[str, list[float]] = {  # weights
    "tenths": [0.3, 0.7],
    "equal": [1, 1, 1],
    "thirds and halves": [2, 3, 6, 1],
    "uneven": [0.000123, 17.3, 2.71828, 0.9],
    "twenty": [number * number + 0.5 for number in range(20)],
    "three hundred": [1 + number % 7 for number in range(300)],
}
BLEND_SIZE = 20_000
"""Number of samples of each of `BLENDS` in golden files."""


def maxtext_runs() -> dict[str, dict[str, Any]]:
    """Return runs of MaxText by name, with the layout's `variant`. Prefixes without weights are joined to one data set."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, **options: Any) -> None:
        found[name] = {"variant": "mmap_npy", "blend": ["a"], "num_samples": None, **options}

    for seed, samples in itertools.product((1234, 3), (None, 1, 90, 130, 400)):
        add(f"seed {seed}, {samples} samples", seed=seed, num_samples=samples)
    for segments, samples in itertools.product((0, 4, 25), (None, 40)):
        add(f"{segments} segments, {samples} samples", max_segments_per_row=segments, sequence_length=100, blend=["b"])
        found[f"{segments} segments, {samples} samples"]["num_samples"] = samples
    for mask, reset in itertools.product((False, True), repeat=2):
        add(f"eod {mask}, {reset}", eod_mask_loss=mask, reset_attention_mask=reset, num_samples=100)
    for blend, samples in itertools.product((["a", "b"], ["a", "b", "d"], ["sentences"]), (None, 200)):
        add(f"{' and '.join(blend)}, {samples} samples", blend=blend, num_samples=samples)
    for subset, samples in itertools.product(("train", "valid"), (None, 30)):
        add(f"split, {subset}, {samples} samples", split="80,20", subset=subset, num_samples=samples, blend=["d"])
    for samples in (None, 50, 400):
        add(f"blend, {samples} samples", blend=[0.3, "a", 0.7, "b"], num_samples=samples)
        add(f"blend of three, {samples} samples", blend=[2, "a", 0, "b", 1, "d", 5, "c"], num_samples=samples)
    add("blend of one", blend=[0, "a", 3, "b"], num_samples=77)
    for blend, length in itertools.product((["a"], ["sentences"]), (16, 100)):
        add(f"mmap of {blend[0]}, {length}", variant="mmap", blend=blend, sequence_length=length)
        add(f"mmap of {blend[0]}, {length}, no reset", variant="mmap", blend=blend, sequence_length=length)
        found[f"mmap of {blend[0]}, {length}, no reset"]["reset_attention_mask"] = False
    return found


def split_runs() -> dict[str, dict[str, Any]]:
    """Return runs of MaxText's `mmap_npy` as `maxtext_runs` does, with `document_split` and `document_subset`."""
    found = {}
    blends = ["a", "b"], ["sentences"], ["a", "b", "d"], [0.3, "a", 0.7, "b"], [2, "sentences", 1, "sentences"]
    splits = ("80,20", "train"), ("80,20", "valid"), ("0.5,0.3,0.2", "test")
    for blend, (split, subset), samples in itertools.product(blends, splits, (None, 40)):
        options = {"variant": "mmap_npy", "blend": blend, "num_samples": samples, "seed": 5}
        name = f"{' '.join(map(str, blend))}, {split}, {subset}, {samples} samples"
        found[name] = {**options, "document_split": split, "document_subset": subset}
    return found


def shuffled_runs() -> dict[str, dict[str, Any]]:
    """Return runs of MaxText's `mmap` as `maxtext_runs` does, with `epochs`, `hosts`, and the `rows` of a host's batch."""
    found = {}
    for (seed, epochs), (hosts, rows) in itertools.product(((0, 1), (7, 3), (2**32 - 2, 4)), ((1, 4), (2, 3), (3, 1))):
        options = {"variant": "mmap", "blend": ["sentences" if hosts == 2 else "a"], "sequence_length": LENGTH}
        name = f"seed {seed}, {epochs} epochs, {hosts} hosts"
        found[name] = {**options, "seed": seed, "epochs": epochs, "hosts": hosts, "rows": rows}
    return found


def hashes_of(batches: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the hash of each array of a trainer's batches. Targets without loss count as 0."""
    keys = ("inputs", "targets", "inputs_position", "inputs_segmentation", "loss")
    digests = {key: hashlib.sha256() for key in keys}
    for batch in batches:
        loss = batch["targets_segmentation"] != 0
        arrays = {**batch, "loss": loss, "targets": np.where(loss, batch["targets"], 0)}
        for key, digest in digests.items():
            digest.update(np.ascontiguousarray(arrays[key], "<i4").tobytes())
    return {key: digest.hexdigest()[:12] for key, digest in digests.items()}


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
