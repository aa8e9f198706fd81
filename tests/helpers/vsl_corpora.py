"""Corpora and runs of OLMo-core's variable-length dataset (VSL)."""

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

EOS, PAD, IGNORED = 1, 0, -100
EPOCHS = 2


class VslCorpus(NamedTuple):
    """Token files of random documents."""

    dtype: str
    documents: tuple[int, ...]  # number of documents of each file
    mean: float  # mean of the logarithms of the documents' lengths
    deviation: float  # their standard deviation
    repetitive: bool = False
    """Whether every third document repeats a token so often that the n-gram filter rejects its rows."""


class VslRun(NamedTuple):
    """A run of OLMo-core: a corpus of `CORPORA`, the settings of the batches, and the curriculum."""

    corpus: str
    shortest: int  # length of the shortest rows
    longest: int
    batch_tokens: int  # number of tokens of a global batch
    ranks: int
    seed: int
    curriculum: str
    num_cycles: int = 8
    balanced: bool = False
    shuffle: bool = True

    @property
    def name(self) -> str:
        flags = "".join((", balanced" * self.balanced, ", not shuffled" * (not self.shuffle)))
        lengths = f"{self.shortest} to {self.longest}, {self.batch_tokens} tokens, {self.ranks} ranks, seed {self.seed}"
        return f"{self.corpus}: {lengths}, {self.curriculum} {self.num_cycles}{flags}"


CORPORA = {
    "three files": VslCorpus("uint16", (190, 30, 140), 4.0, 1.2),
    "long documents": VslCorpus("uint32", (45, 12), 6.0, 0.8),
    "short documents": VslCorpus("uint16", (800,), 3.0, 0.7),
    "repetitive": VslCorpus("uint32", (90, 95, 2, 35), 4.3, 0.9, repetitive=True),
}
_SETTINGS = (
    ("three files", 4, 64, 512, 2, 0),
    ("three files", 16, 128, 768, 3, 34521),
    ("long documents", 32, 128, 512, 1, 7),
    ("long documents", 4, 16, 576, 3, 12),
    ("short documents", 2, 32, 256, 4, 1),
    ("short documents", 4, 16, 384, 1, 0),
    ("repetitive", 8, 64, 384, 2, 3),
)
_CURRICULA: tuple[tuple[Any, ...], ...] = (
    ("natural",),
    ("grow_p2", 2),
    ("grow_p2", 1, True),
    ("grow_p2", 2, True),
    ("grow_linear", 2),
    ("grow_linear", 3),
    ("grow_linear", 1),
)
RUNS = [VslRun(*setting, *curriculum) for setting, curriculum in itertools.product(_SETTINGS, _CURRICULA)]
RUNS += [
    VslRun("three files", 4, 64, 512, 2, 0, "natural", shuffle=False),
    VslRun("long documents", 32, 128, 512, 2, 0, "grow_p2", 4, balanced=True, shuffle=False),
    VslRun("three files", 4, 64, 512, 2, 0, "grow_p2", 99),  # 99 cycles: more than any bucket has batches
    VslRun("short documents", 16, 1024, 1024, 1, 0, "natural"),  # no document has 1,024 tokens
    VslRun("long documents", 32, 256, 512, 1, 0, "natural"),  # OLMo-core keeps lengths as uint8, where 256 is 0
]


def write_corpus(name: str, folder: Path) -> list[Path]:
    """Write the token files of a corpus, headerless like OLMo-core's. Return their paths. Each file ends without an EOS."""
    dtype, files, mean, deviation, repetitive = CORPORA[name]
    rng, paths = np.random.default_rng(len(name)), []
    for number, count in enumerate(files):
        lengths = np.maximum(2, rng.lognormal(mean, deviation, count)).astype(int)
        documents = [rng.integers(2, 60_000, length) for length in lengths]
        for document in documents[::3] if repetitive else ():
            document[len(document) // 3 :] = 5
        tokens = [np.append(document, EOS) for document in documents] + [np.array([9, 9, 9])]
        paths.append(folder / f"part-{number}.npy")
        np.concatenate(tokens).astype(dtype).tofile(paths[-1])
    return paths


def config_of(run: VslRun, paths: list[Path]) -> dict:
    corpus = {"path": list(map(str, paths)), "dtype": CORPORA[run.corpus].dtype, "eos_token_id": EOS}
    layout = {"kind": "olmo_vsl", "sequence_length": run.longest, "min_sequence_length": run.shortest}
    sampler = {"curriculum": run.curriculum, "num_cycles": run.num_cycles, "balanced": run.balanced}
    sampler |= {"global_batch_tokens": run.batch_tokens, "seed": run.seed, "shuffle": run.shuffle, "epochs": EPOCHS}
    return {"corpus": corpus, "layout": layout, "sampler": sampler, "transforms": ["ngram_filter", "shift_targets"]}


def batch_digest(batches: Iterable[tuple[Any, Any]]) -> tuple[str, str]:
    """Return a digest of batches (inputs, labels), [rows, L] each, and a letter for each L: d for 4 to 7, e for 8 to 15."""
    digest, lengths = hashlib.sha256(), []
    for inputs, labels in batches:
        for array in (np.array(inputs.shape), inputs, labels):
            digest.update(np.ascontiguousarray(array, "<i4").tobytes())
        lengths.append(chr(ord("a") + int(inputs.shape[1]).bit_length()))
    return digest.hexdigest()[:16], "".join(lengths)
