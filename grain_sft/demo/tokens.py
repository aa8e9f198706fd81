"""From text to token files: a SentencePiece model, and raw arrays as AI2 writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece

from grain_sft.demo.text import Source
from grain_sft.files import atomic_write
from grain_sft.prepare import training

VOCAB_SIZE = 2048
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


def write_mix(
    mix: Path, tokens_folder: str, tokenizer_name: str, model: bytes, sources: Iterable[Source]
) -> list[Path]:
    """Write token files and the mix that lists them, which comes last; returns the token files, in the mix's order.

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
    written, lines = [], ["# label,path: the documentation of the Python that made this, as grain-sft demo wrote it"]
    for source in sources:
        for number, shard in enumerate(tokenize(processor, source.documents)):
            listed = f"{tokens_folder}/{{TOKENIZER}}/{source.label}/part-{number:05d}.npy"
            path = mix.parent / listed.replace("{TOKENIZER}", tokenizer_name)
            with atomic_write(path, "wb") as file:
                file.write(shard.tobytes())
            written.append(path)
            lines.append(f"{source.label},{listed}")
    with atomic_write(mix) as file:
        file.write("\n".join(lines) + "\n")
    return written
