"""The tokens on disk have the text and the loss that each template's rules give (template_rules.py).

Each template writes real chats and hard ones in every format that can hold their loss. The corpus is opened again, and
converted to every other format.
"""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from prepared import CHAT_FORMATS, CHATML, TEXTS, chats, episode_chats, openchat_chats, save_trained, tool_chats
from template_rules import REFERENCES, SPECIAL, in_one, openchat, spelled, whole_openchat
from tokenizer_makers import FILES, byte_level_json, metaspace_json, save_huggingface

from grain_sft.corpus import Corpus, Document, open_corpus
from grain_sft.errors import PrepareError
from grain_sft.prepare import TEMPLATES, Dataset, Request, convert, load_tokenizer, prepare


class Case(NamedTuple):
    """A template with the tokenizer and the chats that it is tried with."""

    template: str
    tokenizer: str
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.template}-{self.tokenizer}"


PLAIN = ("chats", "roleplay", "toolformer")
CASES = [
    Case("primer", "spm.model", (*PLAIN, "long")),
    Case("primer", "hf", ("chats",)),
    Case("openchat", "spm.model", ("openchat", *PLAIN)),
    Case("openchat", "hf", ("openchat",)),
    Case("episode", "spm.model", ("episodes", *PLAIN)),
    Case("episode", "hf", ("chats",)),
    Case("episode_tool", "spm.model", ("tools", *PLAIN)),
    Case("episode_tool", "hf", ("tools",)),
    Case("episode_tool", "tagless", ("tools",)),
    Case("olmo", "hf", PLAIN),
    Case("olmo", "gemma", ("chats",)),
    Case("hf", "chatml", (*PLAIN, "long")),
]
CHECKED: set[Any] = set()
"""Documents whose text was compared in an earlier format, so that it need not be decoded again."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the chats as JSONL files, and with the tokenizers."""
    made = tmp_path_factory.mktemp("roundtrip")
    records = {"tools": tool_chats(), "openchat": openchat_chats(), "episodes": episode_chats(), "chats": chats()}
    long = [record for record in records["chats"] if len(str(record)) > 50_000]  # takes seconds to tokenize
    records = {name: [each for each in values if len(str(each)) <= 50_000] for name, values in records.items()}
    records["long"] = [{**record, "system": ""} for record in long]
    for path in FILES:
        if path.exists():
            lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
            records[path.stem] = [json.loads(line) for line in lines[:40]]
    for name, values in records.items():
        lines = [json.dumps(value, ensure_ascii=number % 2 == 0) for number, value in enumerate(values)]
        end = "\r\n" if name == "tools" else "\n"
        (made / f"{name}.jsonl").write_text(end.join(["", *lines]), encoding="utf-8", newline="")  # line 1 is empty
    words = [line for text in TEXTS for line in text.splitlines() if line]
    words += [f"the question and the answer, word {number}" for number in range(100)]
    save_trained(made, SPECIAL, 900, words)
    serialized = byte_level_json(SPECIAL)
    save_huggingface(made / "hf", serialized, eos="<|endoftext|>")
    save_huggingface(made / "tagless", byte_level_json(("<|endoftext|>",)), eos="<|endoftext|>")
    save_huggingface(made / "chatml", serialized, eos="<|im_end|>", chat_template=CHATML)
    save_huggingface(made / "gemma", metaspace_json(SPECIAL, scheme="never"), eos="<|endoftext|>")
    return made


def request_of(case: Case, folder: Path, format: str, **options: Any) -> Request:
    datasets = [Dataset((str(folder / f"{name}.jsonl"),)) for name in inputs_of(case, folder)]
    options = {"val_frac": 0.1, "part_bytes": 200_000, "shard_tokens": 60_000, **options}
    return Request(tuple(datasets), case.template, str(folder / case.tokenizer), format, **options)


@pytest.fixture(scope="module")
def made(folder: Path) -> Callable[[Case, str], tuple[Path, dict[str, Any]]]:
    """`made(case, format)` returns the folder and the manifest of a case's corpus, which is prepared once."""

    @functools.cache
    def make(case: Case, format: str) -> tuple[Path, dict[str, Any]]:
        out = folder / f"{case}-{format}"
        return out, prepare(request_of(case, folder, format), out, workers=1)

    return make


def inputs_of(case: Case, folder: Path) -> list[str]:
    return [name for name in case.inputs if (folder / f"{name}.jsonl").exists()]


def records_of(case: Case, folder: Path) -> list[list[str]]:
    """Return the lines of each input without their ends, which are CRLF in tools.jsonl and LF elsewhere."""
    texts = [(folder / f"{name}.jsonl").read_text("utf-8") for name in inputs_of(case, folder)]
    return [text.replace("\r\n", "\n").split("\n") for text in texts]


def splits_of(where: Path, format: str) -> dict[str, Corpus]:
    train = where / "train" if format == "olmo" else where
    val = where / ("openchat.eval.parquet" if format == "openchat" else "val")
    return {"train": open_corpus(train), "val": open_corpus(val)}


def documents_of(where: Path, format: str) -> dict[str, list[tuple[bytes, bytes, tuple[int, int]]]]:
    """Return the tokens, loss and source of every document, in order, by split."""

    def stated(each: Document) -> tuple[bytes, bytes, tuple[int, int]]:
        return each.tokens.astype("<u4").tobytes(), each.loss.astype("<f4").tobytes(), each.source

    return {split: [*map(stated, corpus.iter_documents())] for split, corpus in splits_of(where, format).items()}


def is_refused(case: Case, format: str) -> bool:
    """Return whether the format holds masks only, but the chats have weights other than 0 and 1."""
    return format in ("olmo", "primer") and "openchat" in case.inputs


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("format", CHAT_FORMATS)
def test_text_and_loss_are_those_that_the_rules_of_the_template_give(case, format, folder, made):
    if is_refused(case, format):
        with pytest.raises(PrepareError, match=rf"^format {format}: .* weights other than 0 and 1.*seq-level-weight"):
            made(case, format)
        return
    out, manifest = made(case, format)
    request = request_of(case, folder, format)
    tokenizer = load_tokenizer(request.tokenizer)
    records = records_of(case, folder)
    seen = []
    for split, corpus in splits_of(out, format).items():
        counts = manifest["splits"][split]
        assert (corpus.num_documents, corpus.num_tokens) == (counts["documents"], counts["tokens"])
        assert counts["cut_trainable_tokens"] == 0
        assert corpus.tokenizer_sha256 == tokenizer.sha256 == manifest["tokenizer"]["sha256"]
        assert [Path(name).stem for name in corpus.source_names] == inputs_of(case, folder)
        assert load_tokenizer(out / "tokenizer").sha256 == tokenizer.sha256
        trainable = cut = 0
        for document in corpus.iter_documents():
            file, line = document.source
            record = json.loads(records[file][line - 1])
            bare = (case, file, line, document.tokens.tobytes(), document.loss.astype("f4").tobytes())
            if bare not in CHECKED:
                runs = in_one(REFERENCES[case.template](record))
                assert spelled(tokenizer, document.tokens, document.loss) == runs, bare[:3]
                CHECKED.add(bare)
            trainable += int(np.count_nonzero(document.loss))
            cut += request.template == "openchat" and not whole_openchat(record)[-1][1]
            seen.append((file, line))
        assert (trainable, cut) == (counts["trainable_tokens"], counts["truncated"])
    drops = format == "olmo" or case.template == "openchat"  # leaves out documents in which no token takes loss
    texts = {(file, line): text for file, lines in enumerate(records) for line, text in enumerate(lines, 1) if text}
    runs_of = {place: REFERENCES[case.template](json.loads(text)) for place, text in texts.items()}
    expected = [place for place, runs in runs_of.items() if not drops or any(loss for _, loss in runs)]
    assert sorted(seen) == expected
    assert sum(manifest["dropped"].values()) == len(texts) - len(expected) and manifest["rejected"] == 0


KEPT = [each for each in itertools.product(CASES, CHAT_FORMATS) if len(each[0].inputs) > 1 and not is_refused(*each)]


@pytest.mark.parametrize(("case", "format"), KEPT, ids=str)
def test_a_corpus_has_the_same_documents_after_conversion_to_any_format(case, format, folder, made, tmp_path):
    where, prepared = made(case, format)
    expected = documents_of(where, format)
    for other in CHAT_FORMATS:
        out = tmp_path / other
        if is_refused(case, other):
            with pytest.raises(PrepareError, match="weights other than 0 and 1"):
                convert(where, out, other)
            assert not out.exists()
            continue
        manifest = convert(where, out, other, part_bytes=100_000, shard_tokens=20_000)
        assert documents_of(out, other) == expected, other
        for split, corpus in splits_of(out, other).items():
            counts = {key: prepared["splits"][split][key] for key in ("documents", "tokens", "trainable_tokens")}
            assert counts == {key: manifest["splits"][split][key] for key in counts}
            assert corpus.tokenizer_sha256 == prepared["tokenizer"]["sha256"]
            assert [Path(name).stem for name in corpus.source_names] == inputs_of(case, folder)


@pytest.mark.parametrize(("tokenizer", "format"), [("spm.model", "openchat"), ("hf", "episodes")])
def test_seq_level_weight_divides_the_weight_of_a_message_by_its_number_of_tokens(format, tokenizer, folder, tmp_path):
    case = Case("openchat", tokenizer, ("openchat", "chats"))
    request = request_of(case, folder, format, seq_level_weight=True)
    prepare(request, tmp_path / "out", workers=1)
    loaded = load_tokenizer(request.tokenizer)
    records = records_of(case, folder)
    documents = [each for corpus in splits_of(tmp_path / "out", format).values() for each in corpus.iter_documents()]
    assert len(documents) > 20
    for document in documents:
        file, line = document.source
        record = json.loads(records[file][line - 1])
        for message in record.get("items") or record["messages"]:
            weight = message.get("weight", float(message["role"] == "assistant"))
            message["weight"] = weight / (len(loaded.encode([message["content"]])[0]) + 1)
        assert spelled(loaded, document.tokens, document.loss) == in_one(openchat(record)), (file, line)


def test_a_part_that_ends_with_a_document_does_not_join_it_to_the_next(folder: Path, tmp_path: Path) -> None:
    """Documents of template primer don't end in EOS, so the tokens don't show whether the end of a part cuts a document."""
    case = Case("primer", "spm.model", ("chats",))
    prepare(request_of(case, folder, "olmo"), tmp_path / "one", workers=1)
    expected = documents_of(tmp_path / "one", "olmo")
    lengths = [len(tokens) // 4 for tokens, _, _ in expected["train"]]
    for part_tokens in (max(lengths), sum(lengths[:2]), 20_000):
        out = tmp_path / str(part_tokens)
        prepare(request_of(case, folder, "olmo", part_bytes=2 * part_tokens), out, workers=1)
        assert documents_of(out, "olmo") == expected


def test_every_chat_template_is_tried() -> None:
    """The template `text`, for documents that are not chats, is tried in test_file_kinds.py."""
    assert {case.template for case in CASES} == set(TEMPLATES) - {"text"}
