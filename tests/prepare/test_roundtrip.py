"""Chats in, corpora out, and back: each template's rules in plain Python against what tokens and loss spell on disk.

Every template goes with real chats and with hard ones into every format that fits, is opened again, and is rewritten
into every other format.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hard_chats
import numpy as np
import pytest
from tokenizer_makers import FILES, byte_level_json, metaspace_json, save_huggingface

from grain_sft.corpus import Corpus, open_corpus
from grain_sft.errors import CorpusError, PrepareError
from grain_sft.prepare import FORMATS, TEMPLATES, Dataset, Request, Tokenizer, convert, load_tokenizer, prepare
from grain_sft.prepare.training import train_tokenizer

pytest.importorskip("pyarrow")
pytest.importorskip("transformers")

REAL = 200  # of each real file
EOT = "<|end_of_turn|>"
BLOCKS = ("system", "user", "assistant", "user_context", "assistant_context", "toolcall", "toolresult", "think", "cite")
TAGS = tuple(f"<{slash}myPT_{block}>" for block in BLOCKS for slash in ("", "/"))
SPECIAL = (
    *("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>", EOT, "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<myPT_eot>"),
    *TAGS,
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Run = tuple[str, float]
"""A text, and the loss that each of its tokens takes."""


# What every template writes, by its rules.


def primer(record: dict[str, Any]) -> list[Run]:
    names = {"system": "<|sys|>", "user": "<|usr|>", "assistant": "<|asst|>"}
    runs: list[Run] = []
    for message in record["messages"]:
        loss = float(message["role"] == "assistant")
        runs += [(names[message["role"]], 0), (message["content"], loss), ("<|eot|>", loss)]
    return runs


def openchat(record: dict[str, Any]) -> list[Run]:
    runs = whole_openchat(record)
    while runs and not runs[-1][1]:
        runs.pop()
    return runs


def whole_openchat(record: dict[str, Any]) -> list[Run]:
    """With what takes no loss at its end, which OpenChat cuts off."""
    system, items = record.get("system", ""), record.get("items")
    if items is None:
        items = record["messages"]
        if items[0]["role"] == "system":
            system, items = items[0]["content"], items[1:]
    runs: list[Run] = [(f"{system}{EOT}", 0)] if system else []
    for item in items:
        weight = item.get("weight", float(item["role"] == "assistant"))
        prefix = f"{record.get('condition', '')} {item['role'].title()}:".strip()
        runs += [(prefix, 0), (item["content"], weight), (EOT, weight)]
    return runs


def episode(record: dict[str, Any]) -> list[Run]:
    return list(_tagged(record, ""))


def episode_tool(record: dict[str, Any]) -> list[Run]:
    return list(_tagged(record, "\n"))


def _tagged(record: dict[str, Any], end: str) -> Iterator[Run]:
    if record.get("system"):
        yield f"<myPT_system>{record['system']}</myPT_system>{end}", 0
    for message in record["messages"]:
        role, text = message["role"], message.get("content")
        if role == "assistant_toolcall":
            call = json.dumps({"name": message["name"], **message["arguments"]}, ensure_ascii=False)
            role, text = "assistant", f"<myPT_toolcall>{call}</myPT_toolcall>"
        elif role == "toolresult" and not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False)
        yield f"<myPT_{role}>", 0
        yield f"{text}</myPT_{role}>", float(role == "assistant")
        yield end, 0
    yield "<myPT_eot>", 1
    yield end, 0


def olmo(record: dict[str, Any]) -> list[Run]:
    runs: list[Run] = []
    for number, message in enumerate(record["messages"], 1):
        loss = float(message["role"] == "assistant")
        last = bool(loss) and number == len(record["messages"])
        runs += [(f"<|im_start|>{message['role']}\n", 0), (message["content"], loss)]
        runs += [("<|endoftext|>", 1)] if last else [("<|im_end|>", loss), ("\n", 0)]
    return runs


def hf(record: dict[str, Any]) -> list[Run]:
    """ChatML, the template that this test gives the tokenizer: nothing is trimmed."""
    runs: list[Run] = []
    for message in record["messages"]:
        loss = float(message["role"] == "assistant")
        runs += [(f"<|im_start|>{message['role']}\n", 0), (message["content"], loss), ("<|im_end|>", loss), ("\n", 0)]
    return runs


def in_one(runs: list[Run]) -> list[Run]:
    """Neighbours of the same loss in one, empty ones gone."""
    kept = [run for run in runs if run[0]]
    groups = itertools.groupby(kept, key=lambda run: np.float32(run[1]))
    return [("".join(text for text, _ in group), float(loss)) for loss, group in groups]


def spelled(tokenizer: Tokenizer, tokens: Any, loss: Any) -> list[Run]:
    """What a document's tokens say, cut where the loss changes."""
    weights = np.asarray(loss, np.float32)
    cuts = [0, *(np.flatnonzero(weights[1:] != weights[:-1]) + 1).tolist(), len(weights)]
    return [
        (tokenizer.decode(tokens[start:stop].tolist()), float(weights[start]))
        for start, stop in itertools.pairwise(cuts)
    ]


# What is prepared.


@dataclasses.dataclass(frozen=True)
class Case:
    """A template with the tokenizer and the chats that it is tried with."""

    template: str
    tokenizer: str
    reference: Callable[[dict[str, Any]], list[Run]]
    inputs: tuple[str, ...]


PLAIN = ("chats", "roleplay", "toolformer")
CASES = [
    Case("primer", "spm", primer, PLAIN),
    Case("primer", "hf", primer, PLAIN),
    Case("openchat", "spm", openchat, ("openchat", *PLAIN)),
    Case("openchat", "hf", openchat, ("openchat",)),
    Case("episode", "spm", episode, PLAIN),
    Case("episode", "hf", episode, ("chats",)),
    Case("episode_tool", "spm", episode_tool, ("tools", *PLAIN)),
    Case("episode_tool", "hf", episode_tool, ("tools",)),
    Case("olmo", "hf", olmo, PLAIN),
    Case("olmo", "gemma", olmo, ("chats",)),
    Case("hf", "chatml", hf, PLAIN),
]
WEIGHTED = ("openchat",)
MASKS = ("olmo", "primer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs and tokenizers."""
    made = tmp_path_factory.mktemp("roundtrip")
    records = {
        "chats": hard_chats.chats(),
        "tools": hard_chats.tool_chats(),
        "openchat": hard_chats.openchat_chats(),
        **{path.stem: read_lines(path)[:REAL] for path in FILES if path.exists()},
    }
    for name, values in records.items():
        lines = [json.dumps(value, ensure_ascii=number % 2 == 0) for number, value in enumerate(values)]
        end = "\r\n" if name == "tools" else "\n"
        (made / f"{name}.jsonl").write_text(end.join(["", *lines]), encoding="utf-8", newline="")  # from line 2 on
    words = [line for text in hard_chats.TEXTS for line in text.splitlines() if line]
    words += [f"the question and the answer, word {number}" for number in range(100)]
    (made / "spm.model").write_bytes(train_tokenizer(words, 900, SPECIAL))
    serialized = byte_level_json(SPECIAL)
    save_huggingface(made / "hf", serialized, eos="<|endoftext|>")
    save_huggingface(made / "chatml", serialized, eos="<|im_end|>", chat_template=CHATML)
    save_huggingface(made / "gemma", metaspace_json(SPECIAL, scheme="never"), eos="<|endoftext|>")
    return made


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]


def request_of(case: Case, folder: Path, format: str, **options: Any) -> Request:
    datasets = [Dataset((str(folder / f"{name}.jsonl"),)) for name in inputs_of(case, folder)]
    tokenizer = str(folder / case.tokenizer) + (".model" if case.tokenizer == "spm" else "")
    options = {"val_frac": 0.1, "part_bytes": 200_000, "shard_tokens": 60_000, "schema": "auto", **options}
    return Request(tuple(datasets), case.template, tokenizer, format, **options)


@pytest.fixture(scope="module")
def made(folder: Path) -> Callable[[Case, str], tuple[Path, dict[str, Any]]]:
    """A case's corpus in a format, and its manifest; each is prepared once."""

    @functools.cache
    def make(case: Case, format: str) -> tuple[Path, dict[str, Any]]:
        out = folder / f"{case.template}-{case.tokenizer}-{format}"
        return out, prepare(request_of(case, folder, format), out, workers=1)

    return make


@pytest.fixture(scope="module")
def checked() -> set[Any]:
    """Documents whose text has been compared, which need not be decoded again in the next format."""
    return set()


def inputs_of(case: Case, folder: Path) -> list[str]:
    return [name for name in case.inputs if (folder / f"{name}.jsonl").exists()]


def splits_of(where: Path, format: str) -> dict[str, Corpus]:
    if format == "olmo":
        return {split: open_corpus(where / split) for split in ("train", "val")}
    if format == "openchat":
        names = {"train": where, "val": where / "openchat.eval.parquet"}
        return {split: open_corpus(path) for split, path in names.items()}
    return {"train": open_corpus(where), "val": open_corpus(where / "val")}


def documents_of(where: Path, format: str) -> dict[str, list[tuple[bytes, bytes, tuple[int, int]]]]:
    """Tokens, loss and source of every document, in order."""
    return {
        split: [
            (each.tokens.astype("<u4").tobytes(), each.loss.astype("<f4").tobytes(), each.source)
            for each in corpus.iter_documents()
        ]
        for split, corpus in splits_of(where, format).items()
    }


def is_binary(case: Case) -> bool:
    """Whether its weights are all 0 or 1."""
    return "openchat" not in case.inputs


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def name_of(case: object) -> str:
    return f"{case.template}-{case.tokenizer}" if isinstance(case, Case) else str(case)


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("format", FORMATS)
def test_what_tokens_and_loss_spell_is_what_the_template_s_rules_say(
    case: Case, format: str, folder: Path, made: Any, checked: set[Any]
) -> None:
    if format in MASKS and not is_binary(case):
        with pytest.raises(PrepareError, match=f"format {format}: .* weights other than 0 and 1"):
            made(case, format)
        return
    out, manifest = made(case, format)
    request = request_of(case, folder, format)
    tokenizer = load_tokenizer(request.tokenizer)
    records = [
        (folder / f"{name}.jsonl").read_text("utf-8").replace("\r\n", "\n").split("\n")
        for name in inputs_of(case, folder)
    ]
    seen = []
    for split, corpus in splits_of(out, format).items():
        counts = manifest["splits"][split]
        assert (corpus.num_documents, corpus.num_tokens) == (counts["documents"], counts["tokens"])
        assert counts["cut_trainable_tokens"] == 0
        assert corpus.tokenizer_sha256 == tokenizer.sha256 == manifest["tokenizer"]["sha256"]
        assert [Path(name).stem for name in corpus.source_names] == inputs_of(case, folder)
        assert load_tokenizer(out / "tokenizer").sha256 == tokenizer.sha256
        trainable = cut = 0
        for number, document in enumerate(corpus.iter_documents()):
            file, line = document.source
            record = json.loads(records[file][line - 1])
            bare = (case, file, line, document.tokens.tobytes(), document.loss.astype("f4").tobytes())
            if bare not in checked:
                assert spelled(tokenizer, document.tokens, document.loss) == in_one(case.reference(record)), bare[:3]
                checked.add(bare)
            trainable += int(np.count_nonzero(document.loss))
            cut += request.template == "openchat" and not whole_openchat(record)[-1][1]
            seen.append((file, line))
            if number % 50 == 0:
                again = corpus.document(number)
                assert np.array_equal(again.tokens, document.tokens) and np.array_equal(again.loss, document.loss)
        assert (trainable, cut) == (counts["trainable_tokens"], counts["truncated"])
    expected = [
        (file, line)
        for file, lines in enumerate(records)
        for line, text in enumerate(lines, 1)
        if text and (not request_drops(request) or any(loss for _, loss in case.reference(json.loads(text))))
    ]
    assert sorted(seen) == expected
    dropped = sum(bool(text) for lines in records for text in lines) - len(expected)
    assert sum(manifest["dropped"].values()) == dropped and manifest["rejected"] == 0


def request_drops(request: Request) -> bool:
    """Whether a document without a token that takes loss is left out: in format olmo, and of template openchat."""
    return request.format == "olmo" or request.template == "openchat"


@pytest.mark.parametrize("case", [case for case in CASES if len(case.inputs) > 1], ids=name_of)
@pytest.mark.parametrize("format", FORMATS)
def test_every_other_format_has_the_same_documents(
    case: Case, format: str, folder: Path, made: Any, tmp_path: Path
) -> None:
    if format in MASKS and not is_binary(case):
        return
    where, prepared = made(case, format)
    expected = documents_of(where, format)
    for other in FORMATS:
        out = tmp_path / other
        if other in MASKS and not is_binary(case):
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


@pytest.mark.parametrize("format", ["openchat", "episodes"])
@pytest.mark.parametrize("tokenizer", ["spm", "hf"])
def test_seq_level_weight_is_a_message_s_weight_over_its_length(
    format: str, tokenizer: str, folder: Path, tmp_path: Path
) -> None:
    case = Case("openchat", tokenizer, openchat, ("openchat", "chats"))
    request = request_of(case, folder, format, seq_level_weight=True)
    prepare(request, tmp_path / "out", workers=1)
    loaded = load_tokenizer(request.tokenizer)
    records = [(folder / f"{name}.jsonl").read_text("utf-8").split("\n") for name in case.inputs]
    count = 0
    for corpus in splits_of(tmp_path / "out", format).values():
        for document in corpus.iter_documents():
            file, line = document.source
            record = json.loads(records[file][line - 1])
            key = "items" if "items" in record else "messages"
            for message in record[key]:
                message["weight"] = message.get("weight", float(message["role"] == "assistant"))
                message["weight"] /= len(loaded.encode([message["content"]])[0]) + 1
            assert spelled(loaded, document.tokens, document.loss) == in_one(openchat(record)), (file, line)
            count += 1
    assert count > 20


@pytest.mark.parametrize("format", MASKS)
def test_a_format_of_masks_refuses_weights(format: str, folder: Path, tmp_path: Path) -> None:
    request = request_of(Case("openchat", "spm", openchat, ("chats",)), folder, format, seq_level_weight=True)
    with pytest.raises(PrepareError, match=rf"^format {format}: .*seq-level-weight.*\.$"):
        prepare(request, tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


def test_a_corpus_without_loss_is_not_converted(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint32).tofile(tmp_path / "a.npy")
    with pytest.raises(CorpusError, match="holds tokens without a mask"):
        convert(tmp_path, tmp_path / "out", "episodes")
    assert not (tmp_path / "out").exists()


def test_a_part_that_ends_with_a_document_does_not_join_it_to_the_next(folder: Path, tmp_path: Path) -> None:
    """Documents of the primer template don't end in EOS, so the files themselves don't say which parts cut through one."""
    case = Case("primer", "spm", primer, ("chats",))
    prepare(request_of(case, folder, "olmo"), tmp_path / "one", workers=1)
    expected = documents_of(tmp_path / "one", "olmo")
    lengths = [len(tokens) // 4 for tokens, _, _ in expected["train"]]
    for part_tokens in (max(lengths), sum(lengths[:2]), 20_000):
        out = tmp_path / str(part_tokens)
        prepare(request_of(case, folder, "olmo", part_bytes=2 * part_tokens), out, workers=1)
        assert documents_of(out, "olmo") == expected


def test_every_template_is_tried() -> None:
    assert {case.template for case in CASES} == set(TEMPLATES)
