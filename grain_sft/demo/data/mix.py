"""text: docstrings and help topics, one after the other, cut in windows; raw token files and a mix, as AI2 writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from grain_sft.corpus import open_corpus
from grain_sft.demo.data.data import VOCAB_SIZE, Data, Made
from grain_sft.demo.text import Source, python_sources
from grain_sft.layout import Layout
from grain_sft.prepare import training
from grain_sft.storage import atomic_write, write_bytes

TOKENIZER_NAME = f"python_docs_{VOCAB_SIZE}"
SHARD_TOKENS = 150_000  # a shard ends with the document that reaches this

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def train_tokenizer(documents: Iterable[str], vocab_size: int = VOCAB_SIZE) -> bytes:
    """A SentencePiece BPE model that gives back every text exactly, as the bytes of its file.

    Newlines are a piece of their own, characters that it has not seen are spelled in bytes, and the piece `</s>` ends
    a document. One thread, no sampling: the same documents give the same model.

    Raises:
      GrainSftError: too little text for such a vocabulary.
    """
    lines = (line for document in documents for line in document.splitlines() if line)
    return training.train_tokenizer(lines, vocab_size)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest dtype that holds every token id."""
    return np.min_scalar_type(vocab_size - 1)


def tokenize(
    processor: sentencepiece.SentencePieceProcessor, documents: Sequence[str], shard_tokens: int = SHARD_TOKENS
) -> Iterator[Tokens]:
    """Shards of token ids, one-dimensional, each of whole documents with the EOS token after each document."""
    dtype, eos = token_dtype(processor.vocab_size()), processor.eos_id()
    shard: list[int] = []
    for ids in processor.encode(list(documents)):
        shard += [*ids, eos]
        if len(shard) >= shard_tokens:
            yield np.array(shard, dtype)
            shard = []
    if shard:
        yield np.array(shard, dtype)


def write_mix(mix: Path, tokens_folder: str, tokenizer_name: str, model: bytes, sources: Iterable[Source]) -> None:
    """Write token files and the mix that lists them, which comes last.

    Args:
      mix: the list, beside which `tokens_folder` is.
      tokens_folder: the files go to `tokens_folder/tokenizer_name/label/part-NNNNN.npy`: raw, without a .npy header.
      tokenizer_name: in the mix it stands as `{TOKENIZER}`.
      model: of `train_tokenizer`.
      sources: a folder and some lines of the mix each.

    Raises:
      StorageError: the disk is full or can't be written to.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    lines = ["# label,path: the documentation of the Python that made this, as grain-sft demo wrote it"]
    for source in sources:
        for number, shard in enumerate(tokenize(processor, source.documents)):
            listed = f"{tokens_folder}/{{TOKENIZER}}/{source.label}/part-{number:05d}.npy"
            path = mix.parent / listed.replace("{TOKENIZER}", tokenizer_name)
            with atomic_write(path, "wb") as file:
                file.write(shard.tobytes())
            lines.append(f"{source.label},{listed}")
    with atomic_write(mix) as file:
        file.write("\n".join(lines) + "\n")


def _make(folder: Path, max_characters: int) -> Made:
    sources = python_sources(max_characters)
    model = train_tokenizer(document for source in sources for document in source.documents)
    write_bytes(str(folder / "tokenizer.model"), model)
    mix = folder / "mix.txt"
    write_mix(mix, "tokens", TOKENIZER_NAME, model, sources)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    dtype = token_dtype(processor.vocab_size()).name
    corpus = open_corpus(mix, format="mix", dtype=dtype, eos_token_id=processor.eos_id(), tokenizer=TOKENIZER_NAME)
    characters = sum(source.num_characters for source in sources)
    return Made(corpus, f"{corpus.num_documents:,} docstrings and help topics, {characters / 1e6:.1f} M characters")


def _describe(layout: Layout) -> str:
    return "windows, one after the other"


TEXT = Data(
    name="text",
    make=_make,
    layout={"kind": "windows"},
    transforms=("ngram_filter", "shift_targets"),
    describe=_describe,
)
