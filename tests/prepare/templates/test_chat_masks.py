"""Masks of Jinja chats equal those of a reader that knows three templates by heart, for each kind of tokenizer.

The reader encodes nothing. It reads documents from their ids alone: control tokens by their ids, the text between them decoded.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_styles import CHATML, GEMMA
from tokenizer_makers import FILES, byte_level_json, save_huggingface, save_sentencepiece, save_tiktoken

from grain_sft.prepare import TEMPLATES, TemplateOptions, Tokenizer, load_tokenizer, parse_record, render

jinja2 = pytest.importorskip("jinja2")

LLAMA3 = """{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}"""

CONTROL = (
    *("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
Run = tuple[str, bool, bool]
"""A text, whether it takes loss, and whether the template wrote it itself."""
Decoded = list[tuple[str | int, bool]]
"""Control tokens as ids, other text as it decodes, each with its loss."""


def turns(begin: str, end: str, model: str, bos: bool, trim: Callable[[str], str]) -> Callable[..., Iterator[Run]]:
    """The rules of a template: what begins a turn, with the role in place of ROLE; what ends it, and a rest."""

    def runs(messages: list[dict[str, str]], spelling: str) -> Iterator[Run]:
        yield spelling if bos else "", False, True
        for message in messages:
            loss = message["role"] == "assistant"
            yield begin.replace("ROLE", model if loss else message["role"]), False, True
            yield trim(message["content"]), loss, False
            yield end.strip(), loss, True
            yield end[len(end.strip()) :], False, True

    return runs


HEADER = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
RULES: dict[str, tuple[str, Callable[..., Iterator[Run]]]] = {
    "chatml": (CHATML, turns("<|im_start|>ROLE\n", "<|im_end|>\n", "assistant", False, str)),
    "llama3": (LLAMA3, turns(HEADER, "<|eot_id|>", "assistant", True, str.strip)),
    "gemma": (GEMMA, turns("<start_of_turn>ROLE\n", "<end_of_turn>\n", "model", True, str.strip)),
}


BOS, EOS = "<bos>", "<eos>"
KINDS: dict[str, Callable[[Path], Path]] = {
    "sentencepiece_without": lambda folder: save_sentencepiece(folder, user_defined=()),
    "sentencepiece_with": lambda folder: save_sentencepiece(folder, control=CONTROL[2:], user_defined=()),
    "bytes": lambda folder: save_huggingface(folder, byte_level_json(CONTROL, style="llama3"), bos=BOS, eos=EOS),
    "tiktoken": lambda folder: save_tiktoken(folder, CONTROL, bos=BOS, eos=EOS),
}


def decoded(tokenizer: Tokenizer, tokens: list[int], loss: list[bool]) -> Decoded:
    """A document, read from its ids."""
    found: Decoded = []
    control, pairs = set(tokenizer.special_tokens.values()), zip(tokens, loss, strict=True)
    for (special, lost), group in itertools.groupby(pairs, lambda pair: (pair[0] in control, pair[1])):
        ids = [number for number, _ in group]
        found += [(number, lost) for number in ids] if special else [(tokenizer.decode(ids), lost)]
    return found


def expected(tokenizer: Tokenizer, runs: Iterator[Run]) -> Decoded:
    """A document by its template's rules: a control token is what the template itself spells, and nothing else."""
    ids, found = tokenizer.special_tokens, []
    spelled = re.compile("(" + "|".join(map(re.escape, ids)) + ")")
    for text, loss, own in runs:
        found += [(ids.get(part, part), loss) for part in spelled.split(text)] if own else [(text, loss)]
    return found


def conversations(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Real ones, and made ones whose texts spell control tokens, quote the assistant and have odd characters."""
    found = []
    for path in FILES:
        if path.exists():
            for line in path.read_bytes().splitlines()[seed : seed + count // 4]:
                messages = [m for m in json.loads(line)["messages"] if m["role"] != "system"]
                found.append([{"role": m["role"], "content": m["content"]} for m in messages])
    rng = random.Random(seed)
    parts = [*CONTROL, "</s>", "<s>", "<|im_", "end|>", "hello", " ", "\n", "Übung", "👩‍👩‍👧", "漢字", "x = 1"]
    parts += ["\ue0000\ue001", "don't"]
    while len(found) < count:
        chat: list[dict[str, str]] = []
        for place in range(2 * rng.randrange(1, 4)):
            text = "".join(rng.choice(parts) for _ in range(rng.randrange(0, 7)))
            if chat and rng.random() < 0.2:
                text += chat[-1]["content"]
            chat.append({"role": ("user", "assistant")[place % 2], "content": text})
        found.append(chat)
    return found


def squeezed(pieces: Decoded) -> Decoded:
    """Without whitespace, which SentencePiece does not give back at the ends of a text; neighbours of one loss in one."""
    found: Decoded = []
    for value, loss in pieces:
        text = "".join(value.split()) if isinstance(value, str) else value
        if isinstance(text, str) and found and isinstance(found[-1][0], str) and found[-1][1] == loss:
            found[-1] = (found[-1][0] + text, loss)
        elif text != "":
            found.append((text, loss))
    return found


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "seed"), [(24, 0), pytest.param(3000, 1, marks=pytest.mark.heavy)])
def test_masks_equal_an_independent_decode(kind, name, count, seed, tmp_path):
    tokenizer, chats = load_tokenizer(KINDS[kind](tmp_path)), conversations(count, seed)
    template, rules = RULES[name]
    options = TemplateOptions(special_text="encode", chat_template=template)
    results = render(TEMPLATES["hf"], [parse_record({"messages": chat}) for chat in chats], tokenizer, options)
    for chat, result in zip(chats, results, strict=True):
        tokens, loss = result.tokens.tolist(), result.loss.tolist()
        if kind != "bytes":
            assert tokens.pop() == tokenizer.eos_token_id
            assert loss.pop() == (kind == "sentencepiece_without" and chat[-1]["role"] == "assistant")
        found = rules(chat, "<s>" if kind.startswith("sentencepiece") else BOS)
        assert squeezed(decoded(tokenizer, tokens, loss)) == squeezed(expected(tokenizer, found)), (name, chat)
