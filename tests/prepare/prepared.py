"""Helpers for tests of whole preparations: chats, plain documents, digests of folders, and runs that are stopped half-way.

Some conversations are hard to get right: turns, systems, tools, empty texts, emoji, other scripts, long messages.
"""

import base64
import dataclasses
import hashlib
import itertools
import json
import random
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grain_sft import open_corpus
from grain_sft.corpus import Corpus
from grain_sft.prepare import CHAT_TOKENS, FORMATS, Dataset, Request, prepare, train_tokenizer

CHAT_FORMATS = [name for name in FORMATS if FORMATS[name].holds_loss and not FORMATS[name].of_pairs]
"""Formats of corpora of conversations."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turns(*texts: str) -> list[dict[str, Any]]:
    """Return messages by the user and the assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": turns(*texts)}


def record(number: int) -> dict[str, Any]:
    """Return a chat. Its number decides its turns, their lengths, and whether it has a system message."""
    texts = []
    for turn in range(1 + number % 3):
        texts.append(f"the question {number}.{turn} " + "word " * (number % 11))
        texts.append(f"the answer {number}.{turn} " + "then " * (number % 17))
    messages = turns(*texts, *(["thanks, word by word"] if number % 5 == 0 else []))
    return {"messages": [{"role": "system", "content": "be kind"}, *messages] if number % 4 == 0 else messages}


def write_chats(path: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    """Write `count` records, one per line. The lines with the numbers `bad` are not JSON."""
    lines = [json.dumps(record(number)) if number + 1 not in bad else "{broken}" for number in range(count)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def save_trained(folder: Path, special: Sequence[str] = CHAT_TOKENS, size=400, texts: Sequence[str] = ()) -> Path:
    """Train a small SentencePiece model on `texts`, by default on a few words, and save it."""
    folder.mkdir(exist_ok=True)
    path = folder / "spm.model"
    texts = texts or [f"the question and the answer, word {number}" for number in range(100)]
    path.write_bytes(train_tokenizer(texts, size, special))
    return path


def make_each_format(folder: Path, counts: dict[str, int]) -> Path:
    """Write files of chats, {name: number of chats}, train spm.model, and prepare the chats in each of `CHAT_FORMATS`."""
    datasets = tuple(Dataset((str(write_chats(folder / name, count)),)) for name, count in counts.items())
    model = str(save_trained(folder))
    for form in CHAT_FORMATS:
        prepare(Request(datasets, "primer", model, form, val_frac=0.2), folder / form, workers=1)
    return folder


def digests(out: Path, replace: tuple[str, str] = ("", "")) -> dict[str, str]:
    """Return the hash of each file below `out`, and of its rejected records.

    `replace` has two texts. In .json and .txt files, the second one replaces the first before the hash is computed.
    """
    found = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    rejected = Path(f"{out}.rejected.jsonl")
    found |= {"rejected": rejected.read_bytes()} if rejected.exists() else {}
    assert found
    old, new = (text.encode() for text in replace)
    for name in found:
        if old and name.endswith((".json", ".txt")):
            found[name] = found[name].replace(old, new)
    return {name: hashlib.sha256(found[name]).hexdigest() for name in sorted(found)}


def stamps(folder: Path) -> dict[str, int]:
    """Return the time of the last change of each file and folder."""
    return {path.relative_to(folder).as_posix(): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def rejected_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{out}.rejected.jsonl").read_text("utf-8").split("\n") if line]


class StoppedError(Exception):
    """Raised by the progress of a run that is stopped half-way."""


def stop_half_way(what: str, done: int, total: int) -> None:
    """Stop a run half-way through rendering. The run takes this function as its `progress`."""
    if what == "Rendering" and done > total / 2:
        raise StoppedError


@dataclasses.dataclass
class Place:
    """A folder with eight small inputs in `in`, each one unit of work, and methods that prepare them and run commands."""

    folder: Path
    tokenizers: dict[str, str]
    run_command: Callable[..., Any]

    def __post_init__(self) -> None:
        self.chats = [write_chats(self.folder / f"in/{number}.jsonl", 60 + number) for number in range(8)]
        self.out = self.folder / "out"

    def request(self, template="primer", format="primer", inputs: list[Path] | None = None, **options: Any) -> Request:
        datasets = tuple(Dataset((str(path),)) for path in inputs or self.chats)
        return Request(datasets, template, self.tokenizers[template], format, **options)

    def prepare(self, request: Request, name: str = "out", workers: int = 1, **options: Any) -> dict[str, Any]:
        return prepare(request, self.folder / name, workers=workers, **options)

    def assert_whole(self, request: Request) -> None:
        """Assert that the corpus is that of an uninterrupted run, and that no work folder is left."""
        self.prepare(request, "fresh")
        assert digests(self.out) == digests(self.folder / "fresh")
        shutil.rmtree(self.folder / "fresh")
        assert not [path for path in self.folder.iterdir() if path.name.endswith("work")]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def command(self, request: Request, *more: str, name: str = "out") -> list[str]:
        """Return the command line of `request`."""
        inputs = [path for dataset in request.datasets for path in dataset.paths]
        command = ["prepare", *inputs, "--template", request.template, "--tokenizer", request.tokenizer]
        return [*command, "--format", request.format, "-o", str(self.folder / name), "--workers", "1", *more]

    def succeeds(self, command: list[str]) -> str:
        """Run a command that must succeed. Return its stdout."""
        return self.run_command(*command).out

    def fails(self, command: list[str], lines: int = 1) -> str:
        """Run a command that must fail. Return its stderr, which has `lines` lines."""
        error = self.run_command(*command, status=1).err
        assert error.count("\n") == lines
        return error


FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


def save_golden_tokenizer(folder: Path) -> Path:
    """Save the SentencePiece model of the golden files `fim.json` and `text_olmo.json`. Return its path."""
    from batches import golden_values

    path = folder / "fim.model"
    path.write_bytes(zlib.decompress(base64.b64decode(golden_values("fim.json")["model"])))
    return path


def write(path: Path, texts: Sequence[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": n}) + "\n" for n, text in enumerate(texts)), encoding="utf-8")
    return path


def texts_of(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("the answer\n\t é漢😀<|", k=draw.randrange(1, 200))) for _ in range(count)]


def request_of(tokenizer: Path, *paths: Path | str, **options: Any) -> Request:
    options = {"template": "text", "format": "olmo", **options}
    return Request((Dataset(tuple(map(str, paths))),), tokenizer=str(tokenizer), **options)


def made(spm: Path, path: Path, **options: Any) -> tuple[Corpus, dict[str, Any]]:
    """Prepare a file. Return the corpus and its manifest."""
    out = path.parent / f"out-{len(list(path.parent.iterdir()))}"
    manifest = prepare(request_of(spm, path, **options), out, workers=1)
    return open_corpus(out), manifest


def documents_of(spm: Path, folder: Path, texts: Sequence[str], **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Prepare `texts`. Return the tokens of the documents, in the order of `texts`, and the manifest."""
    corpus, manifest = made(spm, write(folder / "a.jsonl", texts), shuffle=False, **options)
    return [document.tokens.tolist() for document in corpus.iter_documents()], manifest


TEXTS = (
    "",
    " ",
    "\n\n",
    "plain",
    " leading and trailing ",
    "tabs\tand\r\nline ends\n",
    "emoji 👩‍👩‍👧‍👦 🇳🇵 👍🏽 ☕️",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया 日本語のテキスト 한국어",
    "combining e\u0301 a\u0308, zero width \u200b\u200d\ufeff, mathematical \U0001d49c\U0001d505",
    "almost special <|eo t|> < |sys|> <| usr |>",
    'code: {"key": [1, 2, {"a": "b"}]}\n```python\nprint("x" * 3)\n```',
)
"""Contents of messages. In a conversation, a prefix such as "u3.0" tells its messages apart."""


def chats() -> list[dict[str, Any]]:
    """Return records of the plain schema."""
    found = []
    for number, text in enumerate(TEXTS):
        texts = [f"{who}{number}.{turn} {text}" for turn in range(1 + number % 4) for who in "ua"]
        messages = turns(*texts, *(["and then?"] if number % 5 == 4 else []))
        system = [{"role": "system", "content": f"s{number} {text}"}] if number % 2 else []
        found.append({"messages": [*system, *messages]})
    begins = {"messages": [{"role": "assistant", "content": "it begins"}, {"role": "user", "content": "it ends"}]}
    long = ("long text with words. " * 10_000)[:200_000]
    return [*found, begins, chat("", ""), chat(f"u {long}", f"a {long}"), chat("x" * 200_000, "😀" * 50_000)]


def tool_chats() -> list[dict[str, Any]]:
    """Return records of the tool schema."""
    found = []
    for number, text in enumerate(TEXTS):
        call = {"query": text, "top_k": number, "nested": {"list": [text, None, True]}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"u{number} {text}"},
            {"role": "assistant_toolcall", "name": "workspace.search", "arguments": call},
            {"role": "toolresult", "name": "workspace.search", "content": {"documents": [text], "total": number}},
            {"role": "assistant_toolcall", "name": "workspace.none", "arguments": {}},
            {"role": "toolresult", "name": "workspace.none", "content": '"as text"'},
            {"role": "assistant", "content": f"a{number} {text}"},
        ]
        found.append({"system": f"s{number} {text}" if number % 2 else "", "messages": messages})
    return found


def episode_chats() -> list[dict[str, Any]]:
    """Return records of the episode schema, with a context, passages, notes, thoughts and citations."""
    found = []
    for number, text in enumerate(TEXTS):
        messages = [
            {"role": "user", "content": f"u{number} {text}", "context": f"passage {text}"},
            {"role": "assistant_context", "content": f"note {text}"},
            {"role": "assistant", "content": f"a{number} {text}", "think": f"hm {text}", "cite": "doc.pdf"},
        ]
        more = {"system": f"s {text}", "context": f"episode_id: {number}"}
        found.append({"messages": messages * (1 + number % 2), **more})
    return found


def openchat_chats() -> list[dict[str, Any]]:
    """Return records of OpenChat's schema, some with a weight for each message."""
    found = []
    for number, record in enumerate(chats()):
        items = [turn for turn in record["messages"] if turn["role"] != "system"]
        if number % 3 == 1:
            weights = [0.0 if turn["role"] == "user" else 0.5 + index for index, turn in enumerate(items)]
            items = [{**turn, "weight": weight} for turn, weight in zip(items, weights, strict=True)]
        more = {"condition": "GPT4 Correct", "system": f"s{number}"} if number % 2 else {}
        found.append({"items": items, **more})
    return found
