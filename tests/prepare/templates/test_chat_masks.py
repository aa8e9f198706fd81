"""Jinja chat templates give loss to the answers alone with SentencePiece and tiktoken (Hugging Face: test_template_chat.py)."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from template_rules import BY_NAME, Run, hf, in_one, spelled
from tokenizer_makers import save_sentencepiece, save_tiktoken

from grain_sft.prepare import TEMPLATES, TemplateOptions, load_tokenizer, parse_record, render

CONTROL = (
    *("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
KINDS: dict[str, Callable[[Path], Path]] = {
    "sentencepiece_without_control": lambda folder: save_sentencepiece(folder, user_defined=()),
    "sentencepiece_with_control": lambda folder: save_sentencepiece(folder, control=CONTROL[2:], user_defined=()),
    "tiktoken": lambda folder: save_tiktoken(folder, CONTROL, bos="<bos>", eos="<eos>"),
}


def conversations(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Return `count` chats. Their texts spell control tokens, repeat the text before, and have odd characters."""
    found, rng = [], random.Random(seed)
    parts = [*CONTROL, "</s>", "<s>", "<|im_", "end|>", "hello", " ", "\n", "Übung", "👩‍👩‍👧", "漢字", "x = 1"]
    parts += ["\ue0000\ue001", "don't"]
    for _ in range(count):
        chat: list[dict[str, str]] = []
        for place in range(2 * rng.randrange(1, 4)):
            text = "".join(rng.choice(parts) for _ in range(rng.randrange(0, 7)))
            if chat and rng.random() < 0.2:
                text += chat[-1]["content"]
            chat.append({"role": ("user", "assistant")[place % 2], "content": text})
        found.append(chat)
    return found


def squeezed(runs: list[Run]) -> list[Run]:
    """Remove whitespace from (text, loss) pairs, because SentencePiece does not give it back at the ends of a text."""
    return in_one([("".join(text.split()), loss) for text, loss in runs])


@pytest.mark.parametrize(("name", "warned"), [("glm", True), ("plain", True), ("chatml", False), ("generation", False)])
def test_a_template_that_writes_no_end_of_turn_is_reported_unless_eos_is_added(name, warned, tmp_path, caplog):
    TEMPLATES["hf"](BY_NAME[name].load(tmp_path), TemplateOptions())
    assert ("does not learn to end its turn" in caplog.text) == warned
    caplog.clear()
    TEMPLATES["hf"](load_tokenizer(KINDS["tiktoken"](tmp_path)), TemplateOptions(chat_template=BY_NAME[name].template))
    assert not caplog.text


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "seed"), [(24, 0), pytest.param(3000, 1, marks=pytest.mark.heavy)])
def test_documents_spell_their_chats_with_loss_on_the_assistant(kind, name, count, seed, tmp_path):
    """Decoded texts do not tell a control token from text that spells it. test_special_ids.py compares ids, which do."""
    tokenizer, chats, style = load_tokenizer(KINDS[kind](tmp_path)), conversations(count, seed), BY_NAME[name]
    options = TemplateOptions(special_text="encode", chat_template=style.template)
    results = render(TEMPLATES["hf"], [parse_record({"messages": chat}) for chat in chats], tokenizer, options)
    for chat, result in zip(chats, results, strict=True):
        assert result.tokens[-1] == tokenizer.eos_token_id
        assert result.loss[-1] == (kind == "sentencepiece_without_control" and chat[-1]["role"] == "assistant")
        runs = squeezed(spelled(tokenizer, result.tokens[:-1], result.loss[:-1]))
        assert "".join(text for text, loss in runs if loss) == "".join(style.learned(chat).split()), chat
        assert name != "chatml" or runs == squeezed(hf({"messages": chat})), chat
