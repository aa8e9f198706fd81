"""Fill-in-the-middle moves the middles of plain documents to their ends, as Megatron-LM does, and loses no text."""

from pathlib import Path

import pytest
from batches import golden_values
from prepared import FIM, documents_of, save_golden_tokenizer, save_trained, texts_of

from grain_sft.errors import RecordError
from grain_sft.prepare import TemplateOptions, load_tokenizer
from grain_sft.prepare.templates.fim import FillInTheMiddle

LAST = 2**64 - 1  # the largest draw, which chooses nothing


def test_the_middle_is_moved_as_by_megatron(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_golden_tokenizer(tmp_path))
    golden = golden_values("fim.json")
    for case in golden["cases"].values():
        rates = golden["rates"] if case["split"] else {**golden["rates"], "fim_fragment_rate": None}
        named = {"fim_split_sample": case["split"], "fim_no_prefix": case["without"]}
        fim = FillInTheMiddle(tokenizer, TemplateOptions(**rates, **named))
        draws = ((0 if chosen else LAST, 0 if spm else LAST, *cuts) for chosen, spm, *cuts in case["draws"])
        pieces = [piece for piece, _ in fim.pieces_by_draws(case["text"], draws)]
        ids = [tokenizer.encode([piece])[0] if isinstance(piece, str) else list(piece) for piece in pieces]
        assert [number for part in ids for number in part] == case["ids"], case
        assert next(draws, None) is None  # all of Megatron's draws are used


def restored(text: str) -> tuple[str, bool | None]:
    """Move the middle of a document back. Return the text, and whether the suffix came first (None: nothing had moved)."""
    if not text.startswith(FIM[0]):
        return text, None
    first, rest = text.removeprefix(FIM[0]).split(FIM[2])
    suffix, middle = rest.split(FIM[1])
    return first + middle + suffix, not first


def test_the_middles_of_a_share_of_the_documents_are_moved_and_no_text_is_lost(spm: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(spm)
    texts = [text.replace("<|", "") or "x" for text in texts_of(400)]
    options = {"fim_rate": 0.5, "fim_spm_rate": 0.25}
    found, _ = documents_of(spm, tmp_path, texts, **options)
    rows = [restored(tokenizer.decode(document[:-1])) for document in found]
    assert [text for text, _ in rows] == texts
    share = sum(order is not None for _, order in rows)
    assert 160 < share < 240 and 25 < sum(order is True for _, order in rows) < 80
    assert documents_of(spm, tmp_path, texts, **options, fim_tokens=FIM)[0] == found
    assert documents_of(spm, tmp_path, texts, **options, seed=43)[0] != found
    by_id = tuple(str(tokenizer.special_tokens[token]) for token in FIM)
    # a document's text, not its number, decides how it is cut
    assert documents_of(spm, tmp_path, texts[::-1], **options, fim_tokens=by_id)[0][::-1] == found


def test_a_text_that_becomes_a_fim_token_is_refused(spm: Path, tmp_path: Path) -> None:
    """Here the ordinary token "the" is chosen as a FIM token, so no text may have it."""
    the = str(load_tokenizer(spm).encode(["the"])[0][-1])
    with pytest.raises(RecordError, match=r"a\.jsonl:2: messages: 'the .* becomes a special token of this tokenizer"):
        documents_of(spm, tmp_path, ["a question", "the " * 50], fim_rate=1.0, fim_tokens=(the, *FIM[1:]))


def test_a_document_is_split_at_a_token_and_the_middle_of_each_part_is_moved(tmp_path: Path) -> None:
    path = save_trained(tmp_path, (*FIM, "<|file|>"))
    tokenizer = load_tokenizer(path)
    parts = [["the answer", "a question", "whole"], ["one"], ["whole", "whole again"], ["and", "the"]] * 20
    texts = ["<|file|>".join(each) for each in parts]
    with pytest.raises(RecordError, match=r"a\.jsonl:1: text: spells the special token '<\|file\|>'"):
        documents_of(path, tmp_path, texts, fim_rate=1.0)
    options = {"fim_split_sample": "<|file|>", "fim_fragment_rate": 1.0, "fim_no_prefix": "whole"}
    for form, text in (("NFKC", "a\uff1c|file|\uff1eb"), ("NFC", "a<|file|>\u0338b")):
        with pytest.raises(RecordError, match=f"text: {form} makes or breaks the token"):
            documents_of(path, tmp_path, [text], fim_rate=1.0, normalize=form, **options)
    found, _ = documents_of(path, tmp_path, texts, fim_rate=1.0, fim_spm_rate=0.5, **options)
    originals = [list(map(restored, tokenizer.decode(document[:-1]).split("<|file|>"))) for document in found]
    assert [[text for text, _ in each] for each in originals] == parts
    assert all((order is None) == text.startswith("whole") for each in originals for text, order in each)
    assert len({str(each) for each in originals[::4]}) == 1  # equal texts are cut at the same places
