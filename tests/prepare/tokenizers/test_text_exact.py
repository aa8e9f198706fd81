"""Plain documents have the ids of the tokenizer's own library, and preparing many or long ones takes bounded memory."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizer_makers as makers
import tokenizers
from prepared import made
from tiktoken.load import load_tiktoken_bpe

from grain_sft.bench.measuring import run_program
from grain_sft.prepare import load_tokenizer

Encode = Callable[[list[str]], list[list[int]]]  # encodes texts with the tokenizer's own library


def sentencepiece_of(folder: Path, **options) -> tuple[Path, Encode]:
    path = makers.save_sentencepiece(folder, **options)
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return path, lambda texts: list(own.encode(texts, num_threads=1))


def huggingface_of(folder: Path, serialized: str) -> tuple[Path, Encode]:
    path = makers.save_huggingface(folder, serialized, eos="</s>")
    own = tokenizers.Tokenizer.from_str(serialized)
    return path, lambda texts: [encoding.ids for encoding in own.encode_batch(texts, add_special_tokens=False)]


def tiktoken_of(folder: Path) -> tuple[Path, Encode]:
    path = makers.save_tiktoken(folder, ("</s>",), eos="</s>")
    ranks = load_tiktoken_bpe(str(path))
    own = tiktoken.Encoding("own", pat_str=makers.TIKTOKEN_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return path, own.encode_ordinary_batch


MAKERS: dict[str, Callable[[Path], tuple[Path, Encode]]] = {
    "bpe": sentencepiece_of,
    "unigram": lambda folder: sentencepiece_of(folder, model_type="unigram", normalization="nmt_nfkc"),
    "byte-level": lambda folder: huggingface_of(folder, makers.byte_level_json(("</s>",))),
    "pattern": lambda folder: huggingface_of(folder, makers.byte_level_json(("</s>",), style="llama3")),
    "tiktoken": tiktoken_of,
    "metaspace": lambda folder: huggingface_of(folder, makers.metaspace_json(("</s>",))),
}


def texts_of(count: int, longest: int) -> list[str]:
    """Return `count` texts of words and of all Unicode planes. The first is empty, the last has up to `longest` bytes."""
    draw = random.Random(3)
    planes = [[chr(draw.randrange(plane << 16, (plane + 1) << 16)) for _ in range(400)] for plane in range(17)]
    planes = [[each for each in plane if not "\ud800" <= each <= "\udfff" and each != "\0"] for plane in planes]
    words = ["the", "answer", " ", "  ", "\n", "\t", "don't", "2,000.5", "été", "漢字", "한국어", "👩‍👩‍👧‍👦", "עברית"]
    words.append("x" * 60)
    found = ["", " ", "\n", *(plane[0] for plane in planes), *map("".join, planes)]
    while len(found) < count - 1:
        pool = words if draw.random() < 0.7 else draw.choice(planes)
        found.append(draw.choice(["", " "]).join(draw.choices(pool, k=draw.randrange(1, 60))))
    return [*found, " ".join(draw.choices(words, k=longest // 8)).encode()[:longest].decode(errors="ignore")]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("count", "longest"),
    [pytest.param(600, 100_000, id="few"), pytest.param(20_000, 10_000_000, id="many", marks=pytest.mark.heavy)],
)
def test_documents_have_the_ids_of_the_tokenizers_library(count: int, longest: int, maker: str, tmp_path: Path) -> None:
    path, encode = MAKERS[maker](tmp_path)
    texts = texts_of(count, longest)
    with (tmp_path / "a.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(texts))
    corpus, _ = made(path, tmp_path / "a.jsonl", shuffle=False, empty="keep", part_bytes=20_000_000)
    eos = load_tokenizer(path).eos_token_id
    assert corpus.num_documents == len(texts)
    for number, (document, ids) in enumerate(zip(corpus.iter_documents(), encode(texts), strict=True)):
        assert document.tokens.tolist() == [*ids, eos], number


_MEMORY = """
from grain_sft.prepare import Dataset, Request, load_tokenizer, prepare
load_tokenizer(sys.argv[2]).encode(["imports all that it needs"])
before = memory()["peak_mb"]
prepare(Request((Dataset((sys.argv[1],)),), "text", sys.argv[2], "olmo"), sys.argv[3], workers=1)
print(json.dumps({"before": before, **memory()}))
"""


@pytest.mark.heavy
def test_ten_times_the_documents_take_the_same_memory(tmp_path: Path) -> None:
    path, peaks = makers.save_sentencepiece(tmp_path, model_type="unigram"), []
    texts = [json.dumps({"text": text}) + "\n" for text in texts_of(2000, 100_000)]
    for times in (10, 100):
        (tmp_path / f"{times}.jsonl").write_text("".join(texts) * times)
        words = (str(tmp_path / f"{times}.jsonl"), str(path), str(tmp_path / f"out-{times}"))
        peaks.append(run_program(_MEMORY, *words)["peak_mb"])
    print(f"{(tmp_path / '100.jsonl').stat().st_size:,} bytes: {peaks[1]:.0f} MB at most, a tenth: {peaks[0]:.0f} MB")
    assert peaks[1] < 600 and peaks[1] < peaks[0] + 100


@pytest.mark.heavy
def test_a_text_of_ten_megabytes_takes_little_memory(tmp_path: Path) -> None:
    """Encoded as a whole, this text takes 1.3 GB."""
    model, _ = MAKERS["pattern"](tmp_path / "hf")
    text = ("".join(chr(97 + 7 * k % 26) for k in range(5)) + " word, " * 20) * 70_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text[:10_000_000]}))
    found = run_program(_MEMORY, str(tmp_path / "a.jsonl"), str(model), str(tmp_path / "out"))
    print(f"{found['peak_mb'] - found['before']:.0f} MB")
    assert found["peak_mb"] - found["before"] < 400
