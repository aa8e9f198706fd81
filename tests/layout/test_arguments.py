"""Wrong arguments of layouts, and row numbers that don't exist, are errors that say what was expected."""

import functools

import numpy as np
import pytest
from document_corpora import make

from grain_sft import PackedLayout, PaddedLayout, WindowLayout
from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError, LayoutError, RowIndexError, WrongTypeError
from grain_sft.layout import MegatronGptLayout, OlmoVslLayout, PairsLayout, documents_named_in

LAYOUTS = (WindowLayout, PaddedLayout, PackedLayout)
FROM_OLMO = functools.partial(PackedLayout.from_olmo_core, work_dir="work")


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    """Two documents, of 5 and 6 tokens."""
    return make("plain", tmp_path / "corpus", [5, 6]).corpus


@pytest.mark.parametrize("length", [0, -1, -8192, 2.0, "8", None, True, np.float32(4), np.bool_(True), 2**31, 2**70])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_length_is_an_integer_from_1_to_the_largest_int32(corpus, layout, length):
    with pytest.raises(LayoutError) as error:
        layout(corpus, length)
    large = isinstance(length, int) and length > 1
    expected = "positions are int32; expected less than 2**31." if large else "expected an integer, 1 or more."
    assert f"sequence_length={length!r}: {expected}" in str(error.value)


WRONG_ARGUMENTS = [
    (WindowLayout, {"sequence_length": 12}, "leaves no row: the longest of 1 shards has 11 tokens"),
    (PaddedLayout, {"keep": "middle"}, "keep='middle': expected one of last, first."),
    (PaddedLayout, {"min_tokens": 0}, "min_tokens=0: expected an integer, 1 or more"),
    (PaddedLayout, {"min_tokens": 100}, "no document of 2 has 100 tokens or more. Give a smaller min_tokens."),
    (PackedLayout, {"algorithm": "math:pi"}, "'math:pi' is a float; expected a class or a function. Fix"),
    (PackedLayout, {"long_documents": "drop"}, "long_documents='drop': expected one of truncate, fragment"),
    (PackedLayout, {"ties": "any"}, "ties='any': expected one of stable, numpy"),
    (PackedLayout, {"boundaries": "csv"}, "boundaries='csv': expected one of auto, eos"),
    (OlmoVslLayout, {"boundaries": "csv", "min_sequence_length": 2}, "boundaries='csv': expected one of auto, eos"),
    (PackedLayout, {"source_group_size": 0}, "source_group_size=0: expected an integer, 1 or more"),
    (PackedLayout, {"max_segments": 0}, "max_segments=0: expected an integer, 1 or more"),
    (PackedLayout, {"epochs": 0}, "epochs=0: expected an integer, 1 or more"),
    (PackedLayout, {"seed": -1, "algorithm": "multipack"}, "seed=-1: expected an integer, 0 or more"),
    (PackedLayout, {"batch_rows": 0, "algorithm": "multipack"}, "batch_rows=0: expected an integer, 1 or more"),
    (PackedLayout, {"bos_token_id": -1}, "bos_token_id=-1: expected an integer, 0 or more"),
    (PackedLayout, {"bos_token_id": 1 << 16}, "bos_token_id=65536: expected an id that uint16 holds, 0 to 65535"),
]


@pytest.mark.parametrize(("layout", "options", "message"), WRONG_ARGUMENTS, ids=str)
def test_wrong_arguments_are_errors_that_say_what_was_expected(corpus, layout, options, message):
    with pytest.raises((CorpusError, LayoutError)) as caught:
        layout(corpus, **{"sequence_length": 8, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize("layout", [*LAYOUTS, MegatronGptLayout, OlmoVslLayout, PairsLayout, FROM_OLMO])
def test_a_path_instead_of_a_corpus_is_an_error(layout):
    with pytest.raises(WrongTypeError, match=r"corpus is .*expected the result of open_corpus"):
        layout("corpus", 512)


@pytest.mark.parametrize("name", ["surplus", "eod_mask_loss", "reset_position_ids", "index_dir", "document_split"])
def test_an_option_of_a_wrong_type_is_an_error(corpus, name):
    with pytest.raises(WrongTypeError, match=rf"{name} is 1j .*; expected "):
        MegatronGptLayout(corpus, 5, **{name: 1j})


@pytest.mark.parametrize("character", ["a", "9"])
def test_the_error_quotes_the_first_part_of_a_long_line_of_a_file_of_document_numbers(corpus, tmp_path, character):
    (tmp_path / "list.txt").write_text(character * 10**5)
    with pytest.raises(RowIndexError, match=rf"^'{character}{{197}}\.\.\.' is not a document number"):
        documents_named_in([WindowLayout(corpus, 5)], [str(tmp_path / "list.txt")])


@pytest.mark.parametrize("row", [-1, 2, -2, 1 << 40, "a", 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_does_not_exist_is_an_index_error(corpus, layout, row):
    # Each of the three layouts has two rows.
    with pytest.raises(IndexError, match=rf"row {row!r} of {layout.__name__}.*: expected 0 to 1\."):
        layout(corpus, 8 if layout is not WindowLayout else 5).spans(row)
