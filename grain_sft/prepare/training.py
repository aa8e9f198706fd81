"""`train_tokenizer`: trains a SentencePiece model on the texts of conversations."""

import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sentencepiece

from grain_sft.arguments import as_integer, check_choice
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.schema import read_record
from grain_sft.prepare.records.strict_json import check_name
from grain_sft.prepare.tokenizers.tokenizer import MARKER

_BUILT_IN = ("<pad>", "</s>", "<unk>")  # pieces 0, 1 and 2 of every model; see the ids in `_OPTIONS`
CHAT_TOKENS = ("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>")
MIN_VOCAB = 300  # pieces of the smallest vocabulary of `grain-sft train-tokenizer`; 256 of them are the single bytes
MAX_LINES = 2_000_000  # maximum number of lines to train on; more lines hardly change a vocabulary
MAX_CHARACTERS = 1000  # maximum length of a line, at most 4000 bytes; SentencePiece ignores lines above 4192 bytes
# texts are encoded as they are, with all their spaces; one thread makes the same model each time
_OPTIONS: Mapping[str, Any] = {
    "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "byte_fallback": True, "normalization_rule_name": "identity",
    "add_dummy_prefix": False, "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
    "shuffle_input_sentence": False, "num_threads": 1, "minloglevel": 2,
}  # fmt: skip


def train_tokenizer(
    lines: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), *, model_type: str = "bpe"
) -> bytes:
    """Return the bytes of a SentencePiece model that is trained on `lines`.

    The model decodes ids to the encoded text, except that U+2581 becomes a space. A character that is not in `lines` is encoded
    as bytes. The EOS piece is `</s>`. The same lines make the same model, because training uses one thread.

    Args:
      lines: Texts, at most 4192 bytes each; SentencePiece ignores longer ones.
      vocab_size: Number of pieces of the model.
      special_tokens: Texts that become one piece each, such as "<|usr|>". The newline is always one piece.
      model_type: Type of the model in SentencePiece: "bpe", "unigram", "char" or "word".

    Raises:
      PrepareError: An argument has an invalid value, the lines have too little text for `vocab_size` pieces, or a special token
        is not UTF-8 or is the piece of a byte, such as "<0x0A>".
    """
    as_integer("vocab_size", vocab_size, 1, PrepareError)
    check_choice("model_type", model_type, ("bpe", "unigram", "char", "word"), PrepareError)
    for token in special_tokens:
        check_name("special token", token)
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            raise PrepareError(f"special token {token!r}: every model has this piece, for a byte. Leave it out.")
    model = io.BytesIO()
    texts = list(lines)  # not lazily: SentencePiece would hide an exception that `lines` raises
    # SentencePiece writes U+2581 for a space in a piece. Markers such as <|usr|> keep spaces: grain_sft finds them in a text.
    tokens = [token if MARKER.fullmatch(token) else token.replace(" ", "\u2581") for token in special_tokens]
    pieces = [token for token in dict.fromkeys(["\n", *tokens]) if token not in _BUILT_IN]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            user_defined_symbols=pieces,
            **_OPTIONS,
        )
    except RuntimeError as error:
        raise PrepareError(_reason(str(error), vocab_size)) from error
    return model.getvalue()


def _reason(internal: str, vocab_size: int) -> str:
    """Return the error message for the user. `internal` is the message that SentencePiece raised."""
    if match := re.search(r"to a value <= (\d+)", internal):
        most = int(match[1])
        smaller = f", or --vocab-size {most}" if most >= MIN_VOCAB else ""
        return f"the texts are too few for {vocab_size:,} pieces; expected at most {most:,}. Give more text{smaller}."
    if match := re.search(r"required_chars\. \d+ vs (\d+)", internal):
        return f"{vocab_size:,} pieces can't hold the different characters of the texts. Give --vocab-size {match[1]} or more."
    if "sentences_.empty()" in internal:
        return "the inputs hold no text to train on. Expected messages with text. Check the inputs and --schema."
    return f"SentencePiece can't make {vocab_size:,} pieces of this text: {internal}. Give another --vocab-size."


def conversation_lines(
    paths: Sequence[str], schema: str = "auto", special_tokens: Sequence[str] = (), *, on_error: str = "stop"
) -> Iterator[str]:
    """Yield the lines of all messages in files of conversations, at most `MAX_LINES`.

    Lines that contain one of `special_tokens` are left out. Long lines are divided after every 1,000 characters. If `on_error`
    is "skip", bad records are left out.

    Raises:
      RecordError: A record is bad, and `on_error` is "stop". The message has its file and line.
      CorpusFileError: A file can't be read.
    """
    lines = (line for text in _texts(paths, schema, on_error) for line in text.splitlines())
    plain_lines = (line for line in lines if not any(token in line for token in special_tokens))
    divided = (line[at : at + MAX_CHARACTERS] for line in plain_lines for at in range(0, len(line), MAX_CHARACTERS))
    return itertools.islice(divided, MAX_LINES)


def _texts(paths: Sequence[str], schema: str, on_error: str) -> Iterator[str]:
    for path, number, raw in inputs.all_records([paths]):
        try:
            yield from (message.content for message in read_record(raw, schema).messages)
        except RecordError as error:
            if on_error != "skip":
                raise RecordError(f"{path}:{number}: {error}") from error
