"""primer: the specification's rendering rules, by hand and against its own function."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizer_makers import ODD_TEXTS, PRIMER_TOKENS, byte_level_json, save_huggingface, save_sentencepiece

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.messages import Conversation, Message
from grain_sft.prepare.templates import TEMPLATES, TemplateOptions, render
from grain_sft.prepare.templates.primer import SPECIAL_TOKENS, render_chat_sft
from grain_sft.prepare.tokenizers import load_tokenizer

PRIMER = TEMPLATES["primer"]


class OneText:
    """A tokenizer as the specification's function expects it."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def encode(self, text):
        return self._tokenizer.encode([text])[0]

    def special_token_ids(self):
        return {name: self._tokenizer.token_id(text) for name, text in SPECIAL_TOKENS.items()}


@pytest.fixture(params=["sentencepiece", "huggingface"])
def tokenizer(request, tmp_path):
    if request.param == "sentencepiece":
        return load_tokenizer(save_sentencepiece(tmp_path))
    return load_tokenizer(save_huggingface(tmp_path / "hf", byte_level_json(PRIMER_TOKENS)))


def conversation(*messages: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in messages))


def one(tokenizer, *messages, **options):
    (result,) = render(PRIMER, [conversation(*messages)], tokenizer, TemplateOptions(**options))
    return result


def test_special_tokens_stand_around_contents_and_the_assistant_takes_loss(tokenizer):
    system, user, assistant, end = (tokenizer.token_id(text) for text in PRIMER_TOKENS)
    rendered = one(tokenizer, ("system", "be kind"), ("user", "hi"), ("assistant", "hello"))
    texts = [tokenizer.encode([text])[0] for text in ("be kind", "hi", "hello")]
    assert rendered.tokens.tolist() == [system, *texts[0], end, user, *texts[1], end, assistant, *texts[2], end]
    assert rendered.tokens.dtype == np.uint32 and rendered.loss.dtype == np.bool_
    taking = len(texts[2]) + 1
    assert rendered.loss.tolist() == [False] * (len(rendered.tokens) - taking) + [True] * taking


def test_it_gives_what_render_chat_sft_gives(tokenizer):
    chats = [
        [("user", text), ("assistant", text), ("system", text), ("assistant", ""), ("user", text)] for text in ODD_TEXTS
    ]
    options = TemplateOptions(special_text="encode")
    results = render(PRIMER, [conversation(*chat) for chat in chats], tokenizer, options)
    for chat, rendered in zip(chats, results, strict=True):
        messages = [{"role": role, "content": content} for role, content in chat]
        input_ids, labels = render_chat_sft(OneText(tokenizer), messages)
        assert rendered.tokens.tolist() == input_ids
        assert np.where(rendered.loss, rendered.tokens.astype(np.int64), -100).tolist() == labels


def test_the_last_end_of_turn_can_be_left_out(tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    input_ids, labels = render_chat_sft(OneText(tokenizer), messages, add_final_eot=False)
    whole, whole_labels = render_chat_sft(OneText(tokenizer), messages)
    assert (input_ids, labels) == (whole[:-1], whole_labels[:-1])
    assert one(tokenizer, ("user", "hi"), ("assistant", "yo"), add_final_eot=False).tokens.tolist() == input_ids


def test_a_conversation_without_assistant_is_an_error_and_the_others_are_rendered(tokenizer):
    good = conversation(("user", "a"), ("assistant", "b"))
    results = render(PRIMER, [good, conversation(("user", "hello?")), good], tokenizer, TemplateOptions())
    assert isinstance(results[1], RecordError) and "assistant" in str(results[1])
    assert results[0].tokens.tolist() == results[2].tokens.tolist()
    with pytest.raises(ValueError, match="assistant"):
        render_chat_sft(OneText(tokenizer), [{"role": "user", "content": "hello?"}])


@pytest.mark.parametrize("spelling", PRIMER_TOKENS)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_special_text_is_an_error_with_its_place_or_ordinary_text(tokenizer, spelling, role):
    chat = [("user", "a"), (role, f"é👍 {spelling} end"), ("assistant", "b")]
    error = one(tokenizer, *chat)
    assert isinstance(error, RecordError)
    for part in ("messages[1].content", repr(spelling), "character 3", "--special-text encode"):
        assert part in str(error)
    rendered = one(tokenizer, *chat, special_text="encode")
    count = rendered.tokens.tolist().count(tokenizer.token_id(spelling))
    assert count == one(tokenizer, ("user", "a"), (role, "x"), ("assistant", "b")).tokens.tolist().count(
        tokenizer.token_id(spelling)
    )
    assert f"é👍 {spelling} end" in tokenizer.decode(rendered.tokens.tolist())


def test_an_assistant_of_weight_0_takes_no_loss(tokenizer):
    chat = Conversation((Message("user", "a"), Message("assistant", "b", 0.0), Message("assistant", "c", 1.0)))
    (rendered,) = render(PRIMER, [chat], tokenizer, TemplateOptions())
    assert tokenizer.decode(rendered.tokens[rendered.loss].tolist()) == "c<|eot|>"
    for bad in (Message("assistant", "b", 0.5), Message("user", "b", 1.0)):
        (error,) = render(PRIMER, [Conversation((bad, Message("assistant", "c")))], tokenizer, TemplateOptions())
        assert isinstance(error, RecordError) and "messages[0].weight" in str(error)


def test_a_tokenizer_without_the_special_tokens_is_an_error_that_names_them(tmp_path):
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path, user_defined=("<|sys|>", "<|usr|>")))
    with pytest.raises(PrepareError, match=r"<\|asst\|>, <\|eot\|>"):
        one(tokenizer, ("assistant", "x"))
