"""More than 60 small tokenizers of kinds that can turn text into control tokens, for example with a normalizer."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizer_makers as make
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
OTHERS = (*make.PRIMER_TOKENS, "<|end_of_turn|>", "<myPT_user>", "</myPT_user>", "<myPT_assistant>", "</myPT_assistant>")
T5 = ("<pad>", "</s>", "<unk>")
XLMR = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


class Maker(NamedTuple):
    """A tokenizer that `save` writes to a folder.

    Attributes:
      control: Spellings of the control tokens.
      unknown: Spelling of the token for unknown text, the one control token that text may become.
    """

    name: str
    save: Callable[[Path], Path]
    control: tuple[str, ...]
    unknown: str | None = None


def makers() -> Iterator[Maker]:
    yield from _byte_level()
    yield from _metaspace()
    yield from _with_vocabulary()
    yield from _sentencepiece()
    for special, eos in ((CHATML, CHATML[0]), (LLAMA3, LLAMA3[3]), (GEMMA, "<eos>"), ((*OTHERS, *CHATML), CHATML[0])):
        yield Maker(f"tiktoken_{special[0]}", functools.partial(make.save_tiktoken, special=special, eos=eos), special)


def _byte_level() -> Iterator[Maker]:
    flags = {name: {name: True} for name in ("normalized", "lstrip", "rstrip")}
    flags = {"plain": {}, **flags, "single": {"single_word": True}}
    flags["both"] = {"lstrip": True, "rstrip": True, "normalized": True}
    for kind, special in (("gpt2", CHATML), ("llama3", LLAMA3), ("llama3", GEMMA), ("gpt2", (*OTHERS, *CHATML))):
        for flag, values in flags.items():
            if flag in ("plain", "normalized", "rstrip") or kind == "gpt2":
                normalizer = {"type": "NFKC"} if flag in ("normalized", "both") else None
                content = _changed(make.byte_level_json(special, style=kind), values, normalizer)
                yield _huggingface(f"bytes_{kind}_{special[0]}_{flag}", content, special, special[0])
    yield _huggingface("kimi", make.byte_level_json((*CHATML, "<|tool_calls_begin|>")), CHATML, CHATML[0])
    lower = _changed(make.byte_level_json(CHATML, style="gpt2"), {"normalized": True}, {"type": "Lowercase"})
    yield _huggingface("bytes_lowercase", lower, CHATML, CHATML[0])


def _metaspace() -> Iterator[Maker]:
    for scheme in ("first", "always", "never"):
        special = ("<s>", "</s>", *(CHATML if scheme == "always" else GEMMA))
        content = make.metaspace_json(special, scheme=scheme)
        yield _huggingface(f"metaspace_{scheme}", content, special, "</s>")
        if scheme != "never":
            nfkc = _changed(content, {"normalized": True}, {"type": "NFKC"})
            yield _huggingface(f"metaspace_{scheme}_nfkc", nfkc, special, "</s>")


def _with_vocabulary() -> Iterator[Maker]:
    """Yield models that have control tokens in their vocabulary, and a normalizer that can turn other characters into them."""
    strip = {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]}
    for name, special in (("t5", T5), ("xlmr", XLMR), ("t5_chat", (*T5, *CHATML)), ("xlmr_gemma", (*XLMR, *GEMMA))):
        for kind, normalizer in (("nfkc", {"type": "NFKC"}), ("strip", strip)):
            for normalized in (False, True):
                content = _changed(unigram_json(special), {"normalized": normalized}, normalizer)
                yield _huggingface(f"{name}_{kind}_{normalized}", content, special, "</s>", "<unk>")
    bert = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
    yield _huggingface("wordpiece", wordpiece_json(bert), bert, "[SEP]", "[UNK]")


def _sentencepiece() -> Iterator[Maker]:
    for model_type in ("bpe", "unigram"):
        for rule in ("identity", "nmt_nfkc"):
            for name, special, how in (
                ("none", (), "control"),
                ("chatml", CHATML, "control"),
                ("llama3", LLAMA3, "control"),
                ("gemma", GEMMA[2:], "user_defined"),
                ("others", (*OTHERS, *CHATML), "user_defined"),
            ):
                options: dict[str, Any] = {"normalization": rule, "model_type": model_type, "pad": False}
                options |= {"user_defined": (), how: special}
                save = functools.partial(make.save_sentencepiece, **options)
                yield Maker(f"sentencepiece_{model_type}_{rule}_{name}", save, ("<s>", "</s>", *special))


def _huggingface(name: str, content: str, control: tuple[str, ...], eos: str, unknown: str | None = None) -> Maker:
    return Maker(name, functools.partial(make.save_huggingface, serialized=content, eos=eos), control, unknown)


def _changed(content: str, flags: dict[str, Any], normalizer: Any) -> str:
    """Return the tokenizer.json with these flags on its special tokens, and with this normalizer unless it is None."""
    made = json.loads(content)
    for token in made["added_tokens"]:
        token.update(flags)
    if normalizer is not None:
        made["normalizer"] = normalizer
    return json.dumps(made)


def unigram_json(special: tuple[str, ...]) -> str:
    """Return a Unigram model like those of T5 and XLM-R: its control tokens are also pieces of its vocabulary."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    options = {"special_tokens": list(special), "show_progress": False}
    return make.trained(made, trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", **options), special)


def wordpiece_json(special: tuple[str, ...]) -> str:
    """Return a WordPiece model like BERT's, which makes text lower case."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    options = {"special_tokens": list(special), "show_progress": False}
    return make.trained(made, trainers.WordPieceTrainer(vocab_size=400, **options), special)
