"""Write the Megatron corpora of tests/golden/megatron with megatron-core's builder, and the values that its readers give.

PREFIX.bin, PREFIX.idx: small corpora with documents of several sequences, empty sequences and empty documents, in each dtype.
  In the corpora whose names begin with "plain", each document has one sequence.
corpora.json: for each prefix, the tokens of every sequence and the document index, as `IndexedDataset` reads them, and the
  ranges of sequences that `BlendedMegatronDatasetBuilder` gives to the parts of each split.

Needed: megatron-core 0.16.1 with its compiled helpers, torch.
"""

import logging

import numpy as np
import torch
from making import options, versions, write_json
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

CORPORA = {"web_uint16": 41, "code_uint16": 12, "chat_int32": 23, "old_uint8": 7, "old_int8": 5, "old_int16": 6}
CORPORA |= {"old_int64": 4, "plain_uint16": 9, "plain_int32": 9}
"""Number of documents by prefix."""
SPLITS = ("969,30,1", "100,0,0", "80,15,5", "1", "0.5,0.25,0.25", "7,3", "0,0,1", "99.5,0.5,0", "1,1,1")


class Recorder:
    """Dataset of the builder that keeps the sequences that the builder chose for it."""

    def __init__(self, dataset, path, indices, num_samples, split, config):
        del dataset, path, num_samples, split, config
        self.indices = indices

    @staticmethod
    def build_low_level_dataset(path, config):
        del config
        return IndexedDataset(path)

    @staticmethod
    def numel_low_level_dataset(dataset):
        return dataset.sequence_lengths.shape[0]


class Tokenizer:
    """A tokenizer with the two values that megatron-core's configuration reads."""

    vocab_size, eod = 256, 0


def documents(count: int, seed: int, name: str) -> list[list[list[int]]]:
    """Return documents, each a list of sequences. Some sequences are empty, and some documents have no sequence."""
    random = np.random.RandomState(seed)
    if name.startswith("plain"):
        high = 65_498 if name.endswith("uint16") else 100_000
        return [[[high, *random.randint(0, high, length).tolist()]] for length in random.randint(0, 12, count)] + [[[]]]
    lengths = [random.choice([0, 1, 2, 3, 7, 12], random.randint(0, 4)) for _ in range(count)]
    return [[random.randint(0, 120, length).tolist() for length in each] for each in lengths]


def write(prefix: str, dtype: type, docs: list[list[list[int]]]) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in docs:
        tokens = [token for sequence in document for token in sequence]
        builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")


def ranges(prefix: str, split: str) -> list[list[int] | None]:
    """Return, for each part of a split, its range of sequences [first, stop], or None if megatron-core makes no dataset."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=4, blend=([prefix], None), split=split, tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    builder = BlendedMegatronDatasetBuilder(Recorder, [None] * len(Split), lambda: True, config)
    built = builder._build_blended_dataset_splits()
    found = [None if each is None else each.indices.tolist() for each in built]
    return [None if each is None else [each[0], each[-1] + 1] if each else [] for each in found]


if __name__ == "__main__":
    out = options("golden Megatron corpora").out / "megatron"
    out.mkdir(exist_ok=True)
    logging.disable()
    corpora = {}
    for seed, (name, count) in enumerate(CORPORA.items()):
        dtype = np.dtype(name.rpartition("_")[2]).type
        write(str(out / name), dtype, documents(count, seed, name))
        dataset = IndexedDataset(str(out / name))
        corpora[name] = {
            "code": DType.code_from_dtype(dtype),
            "sequences": [dataset[number].tolist() for number in range(len(dataset))],
            "documents": dataset.document_indices.tolist(),
            "splits": {split: ranges(str(out / name), split) for split in SPLITS},
        }
    made = versions("megatron-core", "numpy", "torch", "python")
    write_json(out / "corpora.json", {"versions": made, "cases": corpora}, compact=("cases",))
