"""Text is shown in visible characters only. Signs replace characters that hide, move or control text."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_makers import KINDS, ODD_TEXTS, SENTENCES

from grain_sft.prepare.tokenizers import load_tokenizer
from grain_sft.view.text import TokenTexts, columns, split_characters, visible, visible_line

SIGNS = {
    "a b\n\tc": "a·b⏎⇥c",
    "\x1b[31m\x07\x00\x7f\x9b": "⟨U+001B⟩[31m⟨U+0007⟩⟨U+0000⟩⟨U+007F⟩⟨U+009B⟩",
    "\u202eleft\u2066\u200f": "⟨U+202E⟩left⟨U+2066⟩⟨U+200F⟩",
    "\u200b\ufeff\u00ad\u3164\ufe0f": "⟨U+200B⟩⟨U+FEFF⟩⟨U+00AD⟩⟨U+3164⟩⟨U+FE0F⟩",
    "\u00a0\u2003\u2028": "⟨U+00A0⟩⟨U+2003⟩⟨U+2028⟩",
    b"\xf0\x9fa".decode("utf-8", "surrogateescape"): "⟨xF0⟩⟨x9F⟩a",
    "\u0301": "◌\u0301",
    "\u0941": "◌\u0941",
    "e\u0301 日本 \u05d0": "e\u0301·日本·\u05d0",
    "</script>": "</script>",
}


def test_a_sign_replaces_each_invisible_character():
    assert {text: visible(text) for text in SIGNS} == SIGNS
    assert all(visible_line(f"{text} x y").endswith(" x y") for text in SIGNS)


@given(st.text(st.characters(), max_size=20))
def test_no_text_is_shown_with_an_invisible_character(text):
    for shown in (visible(text), visible_line(text).replace(" ", "")):
        assert not {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"} & {unicodedata.category(each) for each in shown}
        assert shown.isprintable()
        shown.encode()
    assert bool(text) == bool(visible(text))


def test_wide_characters_take_two_columns_and_marks_none():
    widths = {"abc": 3, "日本": 4, "e\u0301": 1, "◌\u0301": 1, "\u0915\u0941": 1, "\u0e01\u0e31": 1}
    assert {text: columns(text) for text in widths} == widths


@pytest.fixture(params=KINDS)
def tokenizer(request, tmp_path):
    return load_tokenizer(KINDS[request.param](tmp_path))


def test_texts_of_tokens_join_to_the_whole_text(tokenizer):
    texts = TokenTexts(tokenizer)
    for text in [*SENTENCES, *(each for each in ODD_TEXTS if "</s>" not in each)]:
        (ids,) = tokenizer.encode([text])
        pieces = [texts.text(number) for number in ids]
        joined = "".join(pieces).encode("utf-8", "surrogateescape").decode()
        assert joined in (text, f" {text}")  # some tokenizers put a space before a text
        parts = list(split_characters(pieces))
        for first, stop, whole in parts:
            assert "".join(pieces[first:stop]).encode("utf-8", "surrogateescape").decode() == whole
        whole_tokens = sum(stop - first for first, stop, _ in parts)
        assert whole_tokens == len([piece for piece in pieces if any("\udc80" <= each <= "\udcff" for each in piece)])


def test_special_tokens_are_recognized_and_ids_outside_of_the_vocabulary_have_no_text(tokenizer):
    texts = TokenTexts(tokenizer)
    for text, number in tokenizer.special_tokens.items():
        assert texts.is_special(number) and texts.text(number) == text
    (ids,) = tokenizer.encode(["quick"])
    assert not texts.is_special(ids[-1])
    assert texts.text(tokenizer.vocab_size) is None and texts.text(-1) is None
    alone = TokenTexts(None)
    assert alone.text(5) is None and not alone.is_special(5)


@given(st.lists(st.binary(max_size=3), max_size=12))
def test_tokens_of_any_bytes_are_joined_only_into_whole_characters(parts):
    pieces = [part.decode("utf-8", "surrogateescape") for part in parts]
    before = 0
    for first, stop, whole in split_characters(pieces):
        assert before <= first < stop <= len(pieces)
        assert b"".join(parts[first:stop]).decode() == whole
        before = stop
