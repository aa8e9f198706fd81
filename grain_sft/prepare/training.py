"""Training a SentencePiece model on the texts of conversations."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import inputs
from grain_sft.prepare.schema import read_record

CHAT_TOKENS = ("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>")
MAX_LINES = 2_000_000  # more teach a vocabulary nothing new
MAX_LINE = 4000  # bytes; SentencePiece leaves out lines of more than 4192


def train_tokenizer(
    lines: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), *, model_type: str = "bpe"
) -> bytes:
    """A SentencePiece model that gives back every text exactly, as the bytes of its file.

    Newlines are a piece of their own, characters that it has not seen are spelled in bytes, and the piece `</s>` ends
    a document. One thread, no sampling: the same lines give the same model.

    Raises:
      PrepareError: too little text for such a vocabulary.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            user_defined_symbols=["\n", *special_tokens],
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            shuffle_input_sentence=False,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise PrepareError(f"SentencePiece can't make {vocab_size} pieces of this text: {error}") from error
    return model.getvalue()


def conversation_lines(paths: Sequence[str], schema: str = "auto", special_tokens: Sequence[str] = ()) -> Iterator[str]:
    """The lines of all messages in files of conversations, at most `MAX_LINES`; text that spells a special token is
    left out.

    Raises:
      RecordError: a bad record, with its file and line.
      CorpusFileError: a file that can't be read.
    """
    count = 0
    for entry, number, raw in inputs.all_records(inputs.list_inputs([paths])):
        try:
            conversation = read_record(raw, schema)
        except RecordError as error:
            raise RecordError(f"{entry.path}:{number}: {error}") from error
        for message in conversation.messages:
            for line in _lines(message.content, special_tokens):
                yield line
                count += 1
                if count == MAX_LINES:
                    return


def _lines(text: str, special_tokens: Sequence[str]) -> Iterator[str]:
    for line in text.splitlines():
        if not line or any(token in line for token in special_tokens):
            continue
        for start in range(0, len(line), MAX_LINE // 4):  # no character takes more than four bytes
            yield line[start : start + MAX_LINE // 4]
