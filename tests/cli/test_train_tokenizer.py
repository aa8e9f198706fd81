"""`train_tokenizer` shows its progress, and refuses texts, sizes and special tokens that cannot be trained."""

import time

import pytest

from grain_sft import prepare, progress
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import train_tokenizer
from grain_sft.prepare.tokenizers import SentencePieceTokenizer

WORDS = ["the question and the answer", "one more line of text"] * 20
NUMBERED = [f"{word} {number}" for number in range(300) for word in WORDS[:2]]
CHARACTERS = ["".join(map(chr, range(0x4E00, 0x5000)))] * 5


UNFIT_SIZES = [
    *((NUMBERED, 9000, kind, "the texts are too few for 9,000 pieces") for kind in ("bpe", "unigram")),
    (CHARACTERS, 300, "bpe", "300 pieces can't hold the different characters of the texts"),
]


@pytest.mark.parametrize(("texts", "size", "model_type", "message"), UNFIT_SIZES)
def test_the_error_of_a_vocabulary_size_that_does_not_fit_names_a_size_that_works(texts, size, model_type, message):
    with pytest.raises(PrepareError, match=message) as error:
        train_tokenizer(texts, size, model_type=model_type)
    assert "INTERNAL" not in str(error.value)
    works = int(str(error.value).rsplit("--vocab-size ", 1)[1].split()[0].rstrip("."))
    assert train_tokenizer(texts, works, model_type=model_type)


def test_special_tokens_that_are_given_twice_or_that_every_model_has_are_trained_once():
    expected = train_tokenizer(WORDS, 300, ["<a>"])
    for special in (["<a>", "<a>"], ["<pad>", "</s>", "<unk>", "<a>"]):
        assert train_tokenizer(WORDS, 300, special) == expected
    spaced = SentencePieceTokenizer({"tokenizer.model": train_tokenizer(WORDS, 300, ["# A:", "<| |>"])}, "")
    assert spaced.encode(["# A:# A:"]) == [[4, 4]] and spaced.special_tokens["<| |>"] == 5


def test_no_text_and_impossible_special_tokens_are_refused():
    none, name = "hold no text to train on", r"special token '<.udcff>' contains NUL or a byte that is not UTF-8"
    byte = "special token '<0x4A>': every model has this piece, for a byte"
    for texts, token, why in (([], "a", none), ([""], "a", none), (WORDS, "<\udcff>", name), (WORDS, "<0x4A>", byte)):
        with pytest.raises(PrepareError, match=why):
            train_tokenizer(texts, 400, [token])
    for size, kind, why in ((0, "bpe", "vocab_size=0"), (None, "bpe", "vocab_size=None"), (400, "x", "model_type='x'")):
        with pytest.raises(PrepareError, match=f"{why}: expected"):
            train_tokenizer(WORDS, size, model_type=kind)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RecordError, MemoryError])
def test_an_exception_from_the_iterator_of_texts_is_raised_unchanged(kind):
    def texts():
        yield from WORDS
        raise kind("here")

    with pytest.raises(kind, match="here"):
        train_tokenizer(texts(), 400)


def test_train_tokenizer_shows_progress(tmp_path, monkeypatch, run_command):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setattr(prepare, "conversation_lines", lambda *_: (time.sleep(0.02) or words for words in WORDS))
    (tmp_path / "x").touch()
    words = ["train-tokenizer", tmp_path / "x", "-o", tmp_path / "m.model", "--vocab-size", "300"]
    assert "Reading the texts: " in run_command(*words).err
