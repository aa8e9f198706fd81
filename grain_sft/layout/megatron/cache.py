"""Reader of the indices that megatron-core (`--data-cache-path`) or MaxText (`mmap_npy`) keep on disk.

An index states which tokens make each sample. The index of a data set has three .npy files: `document_index`, `sample_index`
and `shuffle_index`. megatron-core names them `HASH-GPTDataset-SPLIT-document_index.npy`, and MaxText `HASH-document_index.npy`.
The index of a blend, a weighted mixture of data sets, has two files: `dataset_index` and `dataset_sample_index`.

HASH does not depend on the options `add_extra_token_to_sequence` and `drop_last_partial_validation_sequence`. So files with the
right names may have the wrong samples. From the lengths of the documents, this module computes where each sample begins. It
refuses an index whose samples begin elsewhere.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from grain_sft.errors import LayoutError
from grain_sft.layout.megatron.blending import Blend, blend_of, normalized
from grain_sft.layout.megatron.stream import Cut, Stream, ends_of, sample_index
from grain_sft.storage import files
from grain_sft.types import Floats, Integers

_DOCUMENTS, _SAMPLES, _SHUFFLE = "document_index.npy", "sample_index.npy", "shuffle_index.npy"
_BLEND = ("dataset_index.npy", "dataset_sample_index.npy")
# JSON descriptions of an index, by megatron-core and by MaxText: the ending of the file's name, the key of the token files, and
# the key of the seed.
_DESCRIPTIONS = (("description.txt", "dataset_path", "random_seed"), ("metadata.json", "input_paths", "seed"))

_Found = TypeVar("_Found", Stream, Blend)
_ENDINGS = (_DOCUMENTS, _SAMPLES, _SHUFFLE, *_BLEND, *(ending for ending, *_ in _DESCRIPTIONS))


def stamps_of(folder: str) -> list[list[Any]]:
    """Return the name, size and modification time of each index file in a folder, sorted by name, ready for JSON.

    Raises:
      LayoutError: The folder is not local, can't be read, or has no index files.
    """
    if files.is_remote(folder):
        raise LayoutError(f"index_dir={folder!r}: indices are read from a local folder. Copy it to this machine.")
    try:
        found = [entry for entry in os.scandir(folder) if entry.name.endswith(_ENDINGS)]
        stamps: list[list[Any]] = sorted([each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in found)
    except OSError as error:
        raise LayoutError(f"{folder}: can't be read ({error.strerror or error}). Give the index folder.") from error
    if not any(name.endswith(_DOCUMENTS) for name, *_ in stamps):
        raise LayoutError(f"{folder}: holds no *-{_DOCUMENTS}. Give the folder of the .npy files.")
    return stamps


def read_stream(
    folder: str, path: str, sizes: Integers, before: int, num_samples: int | None, cut: Cut, seed: int | None
) -> Stream:
    """Return the stream of a data set from the index files of a folder.

    Args:
      folder: Local folder of index files.
      path: Path of the data set's token file.
      sizes: Number of tokens of each of the run's documents.
      cut: How the stream is cut into samples: their length, the extra token, and whether the last part is left out.
      num_samples, seed: As in `stream.make_stream`. The seed of an index without a description can't be checked.
      before: Number of the data set's documents that precede those of the run: 90 if the run begins at document 90.

    Raises:
      LayoutError: The data set has no index, its indices are all damaged, or it has several indices that differ.
    """
    tokens = int(sizes.sum(dtype=np.int64))
    epochs = cut.epochs_for(num_samples, max(1, tokens))
    count = cut.samples_in(epochs * tokens)
    shapes = {_DOCUMENTS: (epochs * len(sizes),), _SAMPLES: (count + 1, 2), _SHUFFLE: (count,)}
    described = [start for start in _starts(folder, _DOCUMENTS) if _describes(start, path, seed)]
    sound: dict[str, Stream] = {}
    wrong: list[str] = []
    for start, (order, samples, shuffle) in _of_shapes(described, shapes):
        order = (order - before).astype(np.int32)
        reason = _fault_of(order, samples, shuffle, sizes, epochs, cut)
        if reason:
            wrong.append(f"{start}{reason}")
        elif not any((order == other.order).all() and (shuffle == other.shuffle).all() for other in sound.values()):
            sound[start] = Stream(order, ends_of(sizes, order), np.ascontiguousarray(shuffle))
    if found := _only_sound(sound, wrong, path):
        return found
    listed = ", ".join(f"{ending} {list(shape)}" for ending, shape in shapes.items())
    problem = f"{len(described)} indices have this path and seed, or have no description, but all of them have other shapes"
    fix = "Give the num_samples, sequence_length, seed and add_extra_token_to_sequence of the index, or leave out index_dir."
    raise LayoutError(f"{folder}: no index of {path} with {listed}. {problem}. {fix}")


def read_blend(folder: str, shares: Floats, size: int) -> Blend | None:
    """Return the blend of `size` samples from the index files of a folder; None if the folder has no blends.

    Args:
      folder: Local folder of index files.
      shares: float64 [datasets], weights of the data sets, which sum to 1.

    Raises:
      LayoutError: The folder has blends, but no sound blend with these shares and this size, or several that differ.
    """
    starts = _starts(folder, _BLEND[0])
    described = [start for start in starts if _describes_blend(start, shares)]
    sound: dict[str, Blend] = {}
    wrong: list[str] = []
    for start, (dataset, number) in _of_shapes(described, dict.fromkeys(_BLEND, (size,))):
        path = start + _BLEND[0]
        if dataset.min() < 0 or dataset.max() >= len(shares):
            wrong.append(f"{path}: holds {dataset.min()} to {dataset.max()}; expected 0 to {len(shares) - 1}.")
            continue
        blend = blend_of(dataset, len(shares))
        if (blend.numbers_of(np.arange(size))[1] != number).any():
            wrong.append(f"{start}{_BLEND[1]}: does not count the samples of each data set from 0.")
        elif (abs(blend.counts - shares * size) > 2 + math.log(len(shares))).any():
            # in a sound blend, the count of each data set is not farther from its share than this bound
            wrong.append(f"{path}: takes {blend.counts.tolist()} samples; expected shares of {shares.tolist()}.")
        elif not any(np.array_equal(blend.chosen, other.chosen) for other in sound.values()):
            sound[start] = blend
    found = _only_sound(sound, wrong, f"the weights {shares.tolist()}")
    if starts and found is None:
        problem = f"{len(starts)} blends, but none has {size} samples and weights {shares.tolist()}"
        raise LayoutError(f"{folder}: {problem}. Remove them, or leave out index_dir.")
    return found


def _starts(folder: str, ending: str) -> list[str]:
    """Return the path of each index file in `folder` that ends with `ending`, without this ending."""
    names = [name for name, *_ in stamps_of(folder)]
    return [os.path.join(folder, name.removesuffix(ending)) for name in names if name.endswith(ending)]


def _of_shapes(starts: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, list[Integers]]]:
    """Yield (start, arrays) for each index whose arrays have the expected shapes.

    `starts` are paths without endings, as `_starts` returns them. `shapes` has the expected shape of each file's array, by the
    ending of the file.
    """
    for start in starts:
        arrays = [_load(start + ending) for ending in shapes]
        if [array.shape for array in arrays] == list(shapes.values()):
            yield start, arrays


def _only_sound(sound: Mapping[str, _Found], wrong: Sequence[str], wanted: str) -> _Found | None:
    """Return the only index in `sound`; None if `sound` and `wrong` are empty.

    `wrong` has a sentence about each damaged index. Raise a LayoutError if several indices are sound, or if all are damaged.
    """
    if len(sound) > 1:
        raise LayoutError(f"{'* and '.join(sound)}*: each fits {wanted}. Keep the one that the run used.")
    if wrong and not sound:
        raise LayoutError(f"{wrong[0]} It is damaged, or of other data or options. Remove it, or leave out index_dir.")
    return next(iter(sound.values()), None)


def _describes(start: str, tokens: str, seed: int | None) -> bool:
    """Return whether the description of an index names the token file and the seed; True without a description.

    Only names are compared, without folders, because the files may have been in another folder during the run.
    """
    name = os.path.basename(tokens).removesuffix(".bin")
    for ending, paths_key, seed_key in _DESCRIPTIONS:
        values = _values_of(start + ending, paths_key, seed_key)
        if values is None:
            continue
        paths, described_seed = values
        names = [os.path.basename(str(path)) for path in (paths if isinstance(paths, list) else [paths])]
        if described_seed != seed or name not in names:
            return False
    return True


def _describes_blend(start: str, shares: Floats) -> bool:
    """Return whether megatron-core's description of a blend has these shares; True without a description."""
    values = _values_of(start + _DESCRIPTIONS[0][0], "weights", kind=list[float])
    if values is None:
        return True
    weights = normalized(values[0])
    return weights.shape == shares.shape and np.allclose(weights, shares, rtol=1e-9, atol=0)


def _values_of(path: str, *keys: str, kind: Any = Any) -> list[Any] | None:
    """Return the values of `keys`, of type `kind`, in the description at `path`; None if the file does not exist."""
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            description = json.load(file)
        return [msgspec.convert(description[key], kind) for key in keys]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise LayoutError(f"{path}: can't be read as a description ({error!r}). Remove its index.") from error


def _load(path: str) -> Integers:
    try:
        array: Integers = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header raises errors of any type
        raise LayoutError(f"{path}: can't be read ({error}). Remove its index, or leave out index_dir.") from error
    if array.dtype.kind not in "iu":
        raise LayoutError(f"{path}: holds {array.dtype}; expected integers. Remove its index, or leave out index_dir.")
    return array


def _fault_of(order: Integers, samples: Integers, shuffle: Integers, sizes: Integers, epochs: int, cut: Cut) -> str:
    """Return what is wrong with an index, as a sentence that begins with the file's ending; "" for a sound index."""
    if order.min() < 0 or order.max() >= len(sizes) or (np.bincount(order, minlength=len(sizes)) != epochs).any():
        return f"{_DOCUMENTS}: does not hold each of {len(sizes)} documents {epochs} times."
    expected = sample_index(ends_of(sizes, order), cut)
    if (expected != samples).any():
        at = int((expected != samples).any(axis=1).argmax())
        return f"{_SAMPLES}: sample {at} begins at {samples[at].tolist()}; expected {expected[at].tolist()}."
    seen = np.zeros(len(shuffle), np.bool_)
    if shuffle.min() < 0 or shuffle.max() >= len(seen):
        return f"{_SHUFFLE}: holds {shuffle.min()} to {shuffle.max()}; expected 0 to {len(seen) - 1}."
    seen[shuffle] = True
    return "" if seen.all() else f"{_SHUFFLE}: does not hold sample {int(seen.argmin())}."
