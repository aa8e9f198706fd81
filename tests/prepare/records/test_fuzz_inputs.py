"""`prepare` stops at a damaged line and names its number, or rejects and counts it. It leaves no incomplete corpus."""

import base64
import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from mutators import change_json, changed_bytes
from prepared import chats, openchat_chats, rejected_of, tool_chats
from template_rules import REFERENCES, in_one, spelled

from grain_sft.corpus import open_corpus
from grain_sft.errors import RecordError
from grain_sft.prepare import Dataset, Request, load_tokenizer, prepare

GOOD = b'{"messages": [{"role": "user", "content": "hi %d"}, {"role": "assistant", "content": "yes \xc3\xa4"}]}'
MUTANTS = 1600  # changed lines for each template


def chat(user: bytes = b'"hi"', more: bytes = b"", role: bytes = b'"user"') -> bytes:
    turns = b'[{"role": %s, "content": %s}, {"role": "assistant", "content": "yes"}]' % (role, user)
    return b'{"messages": %s%s}' % (turns, more)


LINES: dict[str, tuple[bytes, str]] = {
    "cut within a character": (b'{"messages": [{"role": "user", "content": "\xe6\x97', "is not UTF-8"),
    "no assistant": (b'{"messages": [{"role": "user", "content": "a"}]}', "no message has the role 'assistant'"),
    "a byte order mark twice": (b"\xef\xbb\xbf\xef\xbb\xbf" + chat(), "not valid JSON at column 1"),
    "a very long role": (chat(role=b'"' + b"user" * 100_000 + b'"'), "messages[0].role: 'user"),
    "a very long bad key": (b'{"messages": [{"%s": 1}]}' % (b"k" * 1_000_000), "messages[0]"),
}
"""Bad lines, and a part of the error of each. test_strict_json.py and test_schema.py have more bad lines."""


def request_of(path: Path | str, tokenizers: dict[str, str], template: str = "primer", **options: Any) -> Request:
    return Request((Dataset((str(path),)),), template, tokenizers[template], "episodes", **options)


def written(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def visible(folder: Path) -> set[str]:
    """Return the names of the files that are not hidden."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def check_stop(request: Request, out: Path, where: str) -> str:
    """Check that `prepare` raises an error that begins with `where`, and leaves no new file. Return the error's text."""
    before = visible(out.parent)
    begin = time.perf_counter()
    with pytest.raises(RecordError) as error:
        prepare(request, out, workers=1)
    assert time.perf_counter() - begin < 120  # a bad line takes milliseconds, a hang longer
    text = str(error.value)
    assert text.startswith(f"{where}: "), text
    assert len(text) < 1000 + len(where) and "\n" not in text
    assert visible(out.parent) == before
    return text


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("template", ["primer", "episode_tool", "hf"])
def test_a_bad_line_stops_prepare_with_its_number_or_is_rejected(name, template, tokenizers, tmp_path):
    bad, expected = LINES[name]
    good = [GOOD % number for number in range(5)]
    path = written(tmp_path / "chats.jsonl", [*good[:2], b"", bad, *good[2:], bad])
    text = check_stop(request_of(path, tokenizers, template), tmp_path / "stopped", f"{path}:4")
    assert expected in text or template != "primer"  # `expected` is worded as in the strict schema
    out = tmp_path / "out"
    manifest = prepare(request_of(path, tokenizers, template, on_error="skip"), out, workers=1)
    assert (manifest["rejected"], manifest["splits"]["train"]["documents"]) == (2, 5)
    found = rejected_of(out)
    assert [(entry["file"], entry["line"]) for entry in found] == [(str(path), 4), (str(path), 8)]
    for entry in found:
        assert f"{path}:4: {entry['reason']}" == text
        assert (entry["record"].encode() if "record" in entry else base64.b64decode(entry["record_base64"])) == bad
    assert sorted(line for _, line in open_corpus(out).sources.tolist()) == [1, 2, 5, 6, 7]
    prepare(request_of(written(path, good), tokenizers, template), out, workers=1, overwrite=True)
    assert rejected_of(out) == []


UNUSUAL = [
    ("BOM, CRLF and blank lines", b"\xef\xbb\xbf\r\n \t \r\n" + GOOD % 1 + b"\r\n\r\n" + GOOD % 2, 2),
    ("a separator of lines", chat('"a\u2028b\x85c"'.encode()), 1),
    ("a carriage return", chat(rb'"a\rb"'), 1),
    ("2 MB", chat(b'"' + b"the question and " * 120_000 + b'"'), 1),
    ("1 MB in one word", chat(b'"' + b"x" * 1_000_000 + b'"'), 1),
    ("2,000 other keys", chat(more=b"".join(b', "number %d": [%d]' % (n, n) for n in range(2000))), 1),
    ("a long key with a deep value", chat(more=b', "%s": %s' % (b"k" * 10**6, b"[" * 63 + b"]" * 63)), 1),
    ("5,000 messages", b'{"messages": [%s]}' % b", ".join([b'{"role": "assistant", "content": "a"}'] * 5_000), 1),
]


@pytest.mark.parametrize(("name", "data", "documents"), UNUSUAL)
def test_unusual_but_valid_files_are_accepted(name, data, documents, tokenizers, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(data)
    manifest = prepare(request_of(tmp_path / "a.jsonl", tokenizers), tmp_path / "out", workers=1)
    assert manifest["splits"]["train"]["documents"] == documents
    check_spelled(tmp_path / "out", "primer", tokenizers, data)


SNIPPETS = (
    *(b"\xff", b"\xed\xa0\x80", b"\0", b"\\u0000", b"\\ud800", b"\\udc00", b"[" * 70, b'{"a":' * 70, b"NaN", b"1e999"),
    *(b"null", b"true", b"0", b"-1", b"[]", b"{}", b'""', b"<|eot|>", b"<myPT_eot>", b"</s>", b"\\", b'"', b",", b"\r"),
    *(b'"weight": 0.5,', b'"role": "user",', b'"content": "x",', b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\xf0\x9f\x98\x80"),
)
KEYS = ("weight", "name", "contents", "context", "think", "arguments", "role ", "Content", "", "messages", "y" * 500)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 1e300, 10**40, "", " ", "user", "assistant", "system", "toolresult", [], {}),
    *([None], {"a": None}, {"role": "user"}, {"": ""}, ["a", {"b": [1.5]}]),
    *("\0", "\ud800", "<|eot|>", "a" * 5000, "👩‍👩‍👧‍👦"),
)


def seeds(template: str) -> list[dict[str, Any]]:
    """Return the valid records of a template from which mutants are made."""
    kinds = {"openchat": openchat_chats, "episode_tool": tool_chats}
    return [record for record in kinds.get(template, chats)() if len(json.dumps(record)) < 5000]


def mutant(draw: random.Random, records: list[dict[str, Any]]) -> bytes:
    """Return a line of JSON with up to two changed values, and then up to three changes of its bytes."""
    record = copy.deepcopy(draw.choice(records))
    for _ in range(draw.choice((0, 0, 1, 2))):
        change_json(record, draw, VALUES, KEYS)
    line = json.dumps(record, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    line = changed_bytes(line, draw, draw.choice((0, 1, 1, 3)), len(line), SNIPPETS)
    return line.replace(b"\n", b" ") or b"{}"


def check_spelled(out: Path, template: str, tokenizers: dict[str, str], data: bytes) -> list[int]:
    """Check that every document has the tokens and loss of its line's record. Return the lines' numbers."""
    tokenizer, lines, found = load_tokenizer(tokenizers[template]), data.split(b"\n"), []
    for document in open_corpus(out).iter_documents():
        record = json.loads(lines[document.source[1] - 1].decode("utf-8-sig"))
        assert spelled(tokenizer, document.tokens, document.loss) == in_one(REFERENCES[template](record)), record
        found.append(document.source[1])
    return found


@pytest.mark.parametrize("template", ["primer", "openchat", "episode", "episode_tool", "olmo", "hf"])
def test_mutants_become_right_documents_or_are_rejected(template, tokenizers, tmp_path):
    draw = random.Random(template)
    records = seeds(template)
    accepted = refused = 0
    for number in range(4):
        data = b"\n".join(mutant(draw, records) for _ in range(MUTANTS // 4))
        folder = tmp_path / str(number)
        folder.mkdir()
        path, out = folder / "chats.jsonl", folder / "out"
        path.write_bytes(data)
        manifest = prepare(request_of(path, tokenizers, template, on_error="skip"), out, workers=1)
        assert visible(folder) <= {"chats.jsonl", "out", "out.rejected.jsonl"}
        rejected = rejected_of(out)
        full = [line for line, text in enumerate(data.split(b"\n"), 1) if text.strip()]
        found = check_spelled(out, template, tokenizers, data)
        dropped = sum(manifest["dropped"].values())
        assert len(found) == len(set(found)) == manifest["splits"]["train"]["documents"]
        assert not set(found) & {entry["line"] for entry in rejected}
        assert len(found) + len(rejected) + dropped == len(full) and manifest["rejected"] == len(rejected)
        accepted, refused = accepted + len(found), refused + len(rejected)
        text = check_stop(request_of(path, tokenizers, template), folder / "stopped", f"{path}:{rejected[0]['line']}")
        assert text.endswith(rejected[0]["reason"])
    assert accepted > MUTANTS / 10 and refused > MUTANTS / 10
