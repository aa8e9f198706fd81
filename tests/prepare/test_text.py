"""Plain documents: their tokens, where they begin and end, and the corpora that are made of them."""

import base64
import json
import random
import unicodedata
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grain_sft import IndexSampler, NpyDataSource, PackedLayout, Pipeline, ShiftTargets, WindowLayout, open_corpus
from grain_sft.cli.main import main
from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError, PrepareError, RecordError
from grain_sft.prepare import Dataset, Request, Tokenizer, dry_run, load_tokenizer, prepare, train_tokenizer
from grain_sft.prepare.templates.text import fim_pieces

GOLDEN = Path(__file__).parents[1] / "golden/fim.json"
FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "spm.model"
    words = [f"the question and the answer, word {number}" for number in range(100)]
    path.write_bytes(train_tokenizer(words, 400, FIM))
    return path


def write(path: Path, texts: Sequence[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": n}) + "\n" for n, text in enumerate(texts)), encoding="utf-8")
    return path


def texts_of(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("the answer\n\t é漢😀<|", k=draw.randrange(1, 200))) for _ in range(count)]


def request_of(spm: Path, path: Path, **options: Any) -> Request:
    return Request((Dataset((str(path),)),), "text", str(spm), **{"format": "olmo", **options})


def made(spm: Path, path: Path, **options: Any) -> tuple[Corpus, dict[str, Any]]:
    """Return the corpus of a file's documents, and its manifest."""
    out = path.parent / f"out-{len(list(path.parent.iterdir()))}"
    manifest = prepare(request_of(spm, path, **options), out, workers=1)
    return open_corpus(out), manifest


def test_text_becomes_batches(spm: Path, tmp_path: Path) -> None:
    texts = texts_of(300)
    corpus, manifest = made(spm, write(tmp_path / "a.jsonl", texts), part_bytes=4000, shuffle=False)
    assert len(corpus.shards) > 5 and not corpus.has_loss and not list(tmp_path.rglob("labels_mask*"))
    tokenizer = load_tokenizer(spm)
    ids = [[*tokenizer.encode([text])[0], tokenizer.eos_token_id] for text in texts]
    assert [document.tokens.tolist() for document in corpus.iter_documents()] == ids
    assert corpus.sources is not None and corpus.sources[:, 1].tolist() == list(range(1, 301))
    stream = np.concatenate([np.array(part) for part in ids])
    assert manifest["splits"]["train"]["trainable_tokens"] == len(stream)
    source = NpyDataSource(WindowLayout(corpus, 64))
    pipeline = Pipeline(
        source, IndexSampler(len(source), global_batch_size=4, seed=0, order="sequential"), [ShiftTargets()]
    )
    batch = pipeline[2]
    assert np.array_equal(batch["inputs"].ravel(), stream[2 * 256 : 3 * 256])
    assert batch["targets_segmentation"].mean() == 63 / 64
    packed = NpyDataSource(PackedLayout(corpus, 512))
    assert sum(int((packed[row]["segment_ids"] > 0).sum()) for row in range(len(packed))) == len(stream)


def test_masks_that_are_missing_are_still_an_error(spm: Path, tmp_path: Path) -> None:
    """Only metadata that say that there are no masks let a corpus have none."""
    made(spm, write(tmp_path / "a.jsonl", texts_of(20)))
    train = next(tmp_path.glob("out-*")) / "train"
    assert not open_corpus(train / "token_ids_part_0000.npy").has_loss
    for name in ("corpus.json", "dataset_statistics.json"):
        path = train / name
        path.write_text(path.read_text().replace('"label_masks": false', '"label_masks": true'))
    for where in (train, train.parent, train / "*.npy"):
        with pytest.raises(CorpusError, match="Without a mask, all of its tokens would take loss"):
            open_corpus(where)


def documents_of(
    spm: Path, folder: Path, texts: Sequence[str], **options: Any
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of the documents of `texts`, in order, and the manifest."""
    corpus, manifest = made(spm, write(folder / "a.jsonl", texts), shuffle=False, **options)
    return [document.tokens.tolist() for document in corpus.iter_documents()], manifest


def with_bos(tokenizer: Path, folder: Path) -> Path:
    """Return the path of a tokenizer.json with the BOS `<s>`, the EOS `</s>`, and words for pieces."""
    tokenizers = pytest.importorskip("tokenizers")
    found = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="<unk>")
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    found.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )
    return folder


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[3, 4, 2], [4, 2]]),
        ({"bos": True}, [[1, 3, 4, 2], [1, 4, 2]]),
        ({"bos": True, "eos": False}, [[1, 3, 4], [1, 4]]),
        ({"eos": False}, [[3, 4], [4]]),
        ({"empty": "keep"}, [[3, 4, 2], [2], [4, 2]]),
        ({"empty": "keep", "bos": True}, [[1, 3, 4, 2], [1, 2], [1, 4, 2]]),
    ],
)
def test_bos_eos_and_empty_documents(options: dict[str, Any], expected: list[Any], spm: Path, tmp_path: Path) -> None:
    found, manifest = documents_of(with_bos(spm, tmp_path / "hf"), tmp_path, ["a b", "", "b"], **options)
    assert found == expected
    assert manifest["dropped"] == ({} if options.get("empty") else {"no text": 1})
    tokens = sum(map(len, expected))
    assert manifest["text"] == {"bytes": 4, "tokens": tokens} and manifest["splits"]["train"]["tokens"] == tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bos": True}, "documents begin with BOS, and this tokenizer has none. Give one that has, or --no-bos"),
        ({"empty": "keep", "eos": False}, "empty=keep: a document without text has no token without BOS and EOS"),
        ({"fim_spm_rate": 0.5}, "a share of the documents that fim_rate chooses"),
        ({"fim_rate": 0.5, "fim_tokens": ("<|fim_prefix|>",)}, "1 tokens; expected three"),
        ({"fim_rate": 0.5, "fim_tokens": ("<|fim_prefix|>", "7", "<|x|>")}, r"'<\|x\|>' is not a special token"),
        ({"fim_rate": 0.5, "fim_tokens": ("7", "7", "8")}, "Name three different ones"),
        ({"fim_rate": 1.5}, "fim_rate is 1.5; expected a number"),
        ({"normalize": "NFD"}, "normalize is 'NFD'; expected one of NFC, NFKC"),
        ({"long_documents": "drop"}, "Give max_length"),
        ({"fim_rate": 0.5, "format": "pairs"}, "pairs have a prompt and responses, no middle"),
        ({"min_length": 9, "max_length": 8}, "min_length=9: expected at most max_length=8"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: dict[str, Any], message: str, spm: Path, tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=message):
        documents_of(spm, tmp_path, ["the answer"], **options)


def test_options_of_text_are_refused_by_other_templates(spm: Path, tmp_path: Path) -> None:
    request = Request((Dataset((str(write(tmp_path / "a.jsonl", ["a"])),)),), "primer", str(spm), "primer", eos=False)
    with pytest.raises(PrepareError, match="eos is an option of template text, not of primer"):
        prepare(request, tmp_path / "out", workers=1)


def test_documents_of_other_lengths_are_cut_or_dropped_and_counted(spm: Path, tmp_path: Path) -> None:
    texts = ["a" * length for length in range(1, 30)]
    whole, _ = documents_of(spm, tmp_path, texts)
    lengths = [len(document) for document in whole]
    cut, manifest = documents_of(spm, tmp_path, texts, min_length=5, max_length=8)
    assert cut == [document[:8] for document in whole if len(document) >= 5]
    assert manifest["dropped"] == {"fewer than 5 tokens": sum(length < 5 for length in lengths)}
    dropped, manifest = documents_of(spm, tmp_path, texts, min_length=5, max_length=8, long_documents="drop")
    assert dropped == [document for document in whole if 5 <= len(document) <= 8]
    assert manifest["dropped"]["more than 8 tokens"] == sum(length > 8 for length in lengths)


def test_text_is_normalized_before_it_is_checked(spm: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(spm)
    texts = ["e\u0301 \ufb01 \u212b", "plain"]
    for form in ("NFC", "NFKC"):
        found, _ = documents_of(spm, tmp_path, texts, normalize=form)
        expected = [unicodedata.normalize(form, text) for text in texts]  # type: ignore[arg-type]
        assert [tokenizer.decode(document[:-1]) for document in found] == expected
    wide = "x \uff1c|fim_prefix|\uff1e"
    with pytest.raises(RecordError, match=r"a\.jsonl:2: text, after NFKC: spells the special token '<\|fim_prefix\|>'"):
        documents_of(spm, tmp_path, ["x", wide], normalize="NFKC")
    (document, _), _ = documents_of(spm, tmp_path, [wide, "x"], normalize="NFKC", special_text="encode")
    assert tokenizer.control_ids.isdisjoint(document[:-1])


def test_another_key_is_named_and_the_summary_counts_bytes(
    spm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", ["the answer é", "the question"], key="content")
    words = ["prepare", str(path), "--template", "text", "--tokenizer", str(spm), "--output", str(tmp_path / "out")]
    assert main([*words, "--schema", "text:text=content"]) == 0
    printed = capsys.readouterr().out
    manifest = json.loads((tmp_path / "out/prepare.json").read_text())
    assert (
        manifest["text"]["bytes"] == 25
        and f"25 bytes {25 / manifest['text']['tokens']:>18.3f} bytes a token" in printed
    )


def test_a_dry_run_counts_what_is_dropped(spm: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["", "the answer", "the " * 40, "x"])
    shown = dry_run(request_of(spm, path, min_length=3, max_length=30, long_documents="drop"), 100).splitlines()
    assert shown[0] == "4 of the first 4 records can be prepared; nothing was written."
    assert [line for line in shown if line.startswith("dropped")] == [
        "dropped    1: fewer than 3 tokens", "dropped    1: more than 30 tokens", "dropped    1: no text",
    ]  # fmt: skip
    assert shown[-1] == "| the answer</s>" and not [line for line in shown if line.startswith("cut")]


def test_a_response_of_a_pair_may_be_empty(spm: Path, tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "pairs.jsonl", load_tokenizer(spm)
    path.write_text(json.dumps({"chosen": "the answer", "rejected": ""}) + "\n")
    corpus, manifest = made(spm, path, format="pairs")
    [document] = corpus.iter_documents()
    eos = tokenizer.eos_token_id
    assert document.tokens.tolist() == [*tokenizer.encode(["the answer"])[0], eos, eos]
    assert not manifest["dropped"] and "label_masks" not in json.loads(next(tmp_path.rglob("corpus.json")).read_text())


def test_a_saved_index_and_commands_open_a_corpus_without_masks(
    spm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, _ = made(spm, write(tmp_path / "a.jsonl", texts_of(100)), part_bytes=3000)
    corpus.save(tmp_path / "index.json")
    assert open_corpus(tmp_path / "index.json").fingerprint == corpus.fingerprint
    config = tmp_path / "run.json"
    settings = {"kind": "packed", "sequence_length": 64}, {"global_batch_size": 4, "seed": 0}
    config.write_text(json.dumps({"corpus": {"path": "index.json"}, "layout": settings[0], "sampler": settings[1]}))
    for words in (["verify", str(config)], ["receipt", str(config)], ["trace", str(config), "--steps", "0:2"]):
        assert main(words) == 0, capsys.readouterr().err
    assert str(tmp_path / "a.jsonl") in capsys.readouterr().out


def golden_tokenizer(folder: Path) -> tuple[Path, Tokenizer]:
    path = folder / "fim.model"
    path.write_bytes(zlib.decompress(base64.b64decode(json.loads(GOLDEN.read_text())["model"])))
    return path, load_tokenizer(path)


def test_the_middle_is_moved_as_by_megatron(tmp_path: Path) -> None:
    _, tokenizer = golden_tokenizer(tmp_path)
    cases = json.loads(GOLDEN.read_text())["cases"].values()
    assert {case["suffix_first"] for case in cases} == {True, False}
    for case in cases:
        tokens = [tokenizer.special_tokens[token] for token in FIM]
        pieces = [
            piece for piece, _ in fim_pieces(case["text"], case["cuts"], tokens, suffix_first=case["suffix_first"])
        ]
        ids = [tokenizer.encode([piece])[0] if isinstance(piece, str) else list(piece) for piece in pieces]
        assert [number for part in ids for number in part] == case["ids"]


def moved(tokenizer: Tokenizer, document: list[int]) -> tuple[str, bool | None]:
    """Return the text of a document, and whether its suffix comes first; None: it is whole."""
    text = tokenizer.decode(document[:-1])
    if not text.startswith(FIM[0]):
        return text, None
    first, rest = text.removeprefix(FIM[0]).split(FIM[2])
    suffix, middle = rest.split(FIM[1])
    if first:
        return first + middle + suffix, False
    return middle + suffix, True


def test_a_share_of_the_documents_is_moved_and_none_is_lost(spm: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(spm)
    texts = [text.replace("<|", "") or "x" for text in texts_of(400)]
    options = {"fim_rate": 0.5, "fim_spm_rate": 0.25}
    found, _ = documents_of(spm, tmp_path, texts, **options)
    rows = [moved(tokenizer, document) for document in found]
    assert [text for text, _ in rows] == texts
    share = sum(order is not None for _, order in rows)
    assert 160 < share < 240 and 25 < sum(order is True for _, order in rows) < 80
    named, _ = documents_of(spm, tmp_path, texts, **options, fim_tokens=FIM)
    assert named == found
    other, _ = documents_of(spm, tmp_path, texts, **options, seed=43)
    assert other != found
    by_id = tuple(str(tokenizer.special_tokens[token]) for token in FIM)
    backwards, _ = documents_of(spm, tmp_path, texts[::-1], **options, fim_tokens=by_id)
    assert backwards[::-1] == found  # its text decides how a document is cut


def test_text_that_is_of_a_fim_token_is_refused(spm: Path, tmp_path: Path) -> None:
    """An ordinary piece that is named as a FIM token must not come out of a text."""
    tokenizer = load_tokenizer(spm)
    the = str(tokenizer.encode(["the"])[0][-1])
    with pytest.raises(RecordError, match="becomes a special token of this tokenizer"):
        documents_of(spm, tmp_path, ["the " * 50], fim_rate=1.0, fim_tokens=(the, *FIM[1:]))
