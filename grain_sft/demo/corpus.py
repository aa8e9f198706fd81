"""The demo's corpus and config. A conversation asks about Python's standard library, and a docstring answers."""

import ast
import json
import os
import re
import shutil
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grain_sft.corpus import Corpus, open_corpus
from grain_sft.errors import GrainSftError
from grain_sft.prepare import CHAT_TOKENS, Dataset, Request, conversation_lines, prepare, train_tokenizer
from grain_sft.storage import atomic_write, write_bytes

VOCAB_SIZE = 2048
SEQUENCE_LENGTH = 256  # tokens
GLOBAL_BATCH_SIZE = 8  # rows
CONFIG = "config.json"
"""File name of the config in the demo's folder."""

MAX_CHARACTERS = 3_500_000  # limit of the docstrings together
MIN_CHARACTERS = 100_000  # the tokenizer cannot be trained on fewer

_SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "site-packages", "test", "tests", "idle_test",
    "ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo",
}  # fmt: skip
_QUESTIONS: dict[type[ast.AST], str] = {
    ast.Module: "What is the module {} for?",
    ast.ClassDef: "What is {}?",
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef), "What does {} do?"),
}
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, which `prepare` refuses, and lone surrogates, which UTF-8 cannot encode


class Entry(NamedTuple):
    """A docstring, and the question that it answers."""

    question: str
    text: str


def prepare_corpus(root: Path, seed: int, max_characters: int = MAX_CHARACTERS) -> tuple[Corpus, Mapping[str, Any]]:
    """Make the corpus and the config in the folder `root`. Return the corpus and its manifest, prepare.json.

    Args:
      seed: Seed of the order of rows, for the config.
      max_characters: Limit of the characters of all answers together.
    """
    folder = root / "corpus"
    shutil.rmtree(folder, ignore_errors=True)
    print("reading the docstrings of Python's standard library ...", flush=True)
    chats, model = str(folder / "chats.jsonl"), str(folder / "tokenizer.model")
    with atomic_write(chats) as file:
        for question, text in docstrings(max_characters):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    lines = conversation_lines([chats], special_tokens=CHAT_TOKENS)
    write_bytes(model, train_tokenizer(lines, VOCAB_SIZE, CHAT_TOKENS))
    # Template and format are both "primer". With special_text="encode", a docstring that spells a special token, such as
    # `</s>`, is ordinary text.
    request = Request((Dataset((chats,)),), "primer", model, "primer", special_text="encode")
    manifest = prepare(request, folder / "sft", workers=1)
    config = {
        "corpus": {"path": str(folder / "sft")},
        "layout": {"kind": "packed", "sequence_length": SEQUENCE_LENGTH},
        "sampler": {"order": "shuffle", "seed": seed, "global_batch_size": GLOBAL_BATCH_SIZE},
        "transforms": ["shift_targets"],
    }
    write_bytes(str(root / CONFIG), json.dumps(config, indent=2).encode())
    return open_corpus(folder / "sft"), manifest


def docstrings(max_characters: int = MAX_CHARACTERS) -> list[Entry]:
    """Return the docstrings of the standard library, each text once, in an order that depends only on the library's files.

    Args:
      max_characters: Limit of the characters of all texts together.

    Raises:
      GrainSftError: The docstrings have fewer than `MIN_CHARACTERS`.
    """
    library = Path(sysconfig.get_path("stdlib"))
    question_by_text: dict[str, str] = {}
    characters = 0
    for question, text in library_docstrings(library):
        if not text or text in question_by_text or _NOT_TEXT.search(text):
            continue
        if characters + len(text) > max_characters:
            break
        characters += len(text)
        question_by_text[text] = question
    else:  # all docstrings were read: they are below the limit
        if characters < MIN_CHARACTERS:
            problem = f"found {characters} characters of docstrings; expected {MIN_CHARACTERS} or more"
            raise GrainSftError(f"{library}: {problem}. Use a Python that comes with its source files.")
    return [Entry(question, text) for text, question in question_by_text.items()]


def library_docstrings(library: Path) -> Iterator[Entry]:
    """Yield an entry for each module, class and function in the .py files below `library`.

    An entry for an object without a docstring has the text "". Tests, demos and installed packages are left out. Files are
    parsed, never imported. A file that can't be parsed is skipped.
    """
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
            yield from _docstrings(tree, module)


def _docstrings(node: ast.AST, name: str) -> Iterator[Entry]:
    """Yield an entry for `node`, whose full name is `name`, and for each class and function in it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield Entry(_QUESTIONS[type(node)].format(name), (ast.get_docstring(node) or "").strip())
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # may have definitions, as in `if` and `try`
            yield from _docstrings(child, name)
