"""Makers of small real tokenizers, trained in the test process: SentencePiece, tiktoken, and those of Hugging Face."""

import base64
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FILES = [DATA / "roleplay.jsonl", DATA / "toolformer.jsonl"]

PRIMER_TOKENS = ("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>")
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "You are a helpful assistant. What is 2 + 2? The answer is 4.",
    "Imagine that you are a detective: describe the scene, the suspects and your plan.",
    '{"name": "weather", "arguments": {"city": "Los Angeles", "unit": "celsius"}}',
    "User: hello there! Assistant: GPT4 Correct, how can I help you today?\n\n1) one\n2) two\n",
    "def main():\n    print('hello world')\n    return None\n",
    "Übung macht den Meister; ça va très bien, señor.",
    '<tag> [list] |pipe| a_b-c/d @ # $ % ^ & * ~ ` \\ " = +',
]

ODD_TEXTS = [
    "", " ", "\n", "  two  spaces  ", "tabs\tand\nnew lines\n\n\n", "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽!",
    "مرحبا بالعالم، كيف حالك؟", "שלום עולם 123 abc", "漢字とかな、한국어", "combining e\u0301 a\u0308\u0323 z\u0335",
    "zero\u200bwidth\u200djoiner\ufeff", "\U0010ffff\ufffd\u2028", "</s> no, < s > | eot |",
]  # fmt: skip


CORPUS = SENTENCES * 8
"""Text that every maker trains on."""


@functools.cache
def sentencepiece_model(
    *, vocab_size=420, control=(), user_defined=PRIMER_TOKENS, pad=True, normalization="identity", model_type="bpe"
):
    """Return a SentencePiece model with byte fallback, which encodes any text and decodes it unchanged."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line]),
        model_writer=model,
        model_type=model_type,
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name=normalization,
        remove_extra_whitespaces=False,
        split_by_unicode_script=False,
        allow_whitespace_only_pieces=True,
        control_symbols=list(control),
        user_defined_symbols=list(user_defined),
        pad_id=3 if pad else -1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def save_sentencepiece(folder: Path, **options: Any) -> Path:
    """Save a SentencePiece model, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.model"
    path.write_bytes(sentencepiece_model(**options))
    return path


@functools.cache
def byte_level_json(special: tuple[str, ...], *, ordinary: tuple[str, ...] = (), style: str = "gpt2") -> str:
    """Return a byte-level BPE `tokenizer.json`, like those of GPT-2, Llama 3, Qwen and OLMo."""
    made = Tokenizer(models.BPE())
    if style == "gpt2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(TIKTOKEN_PATTERN), "isolated")
        by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, by_byte])
    made.post_processor = processors.ByteLevel(trim_offsets=style == "gpt2")
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    return trained(made, trainer, special, ordinary)


def trained(made: Any, trainer: Any, special: tuple[str, ...], ordinary: tuple[str, ...] = ()) -> str:
    """Train a tokenizer, give it its added tokens, and return its `tokenizer.json`."""
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary])
    return str(made.to_str())


@functools.cache
def metaspace_json(special: tuple[str, ...], *, scheme: str = "first") -> str:
    """Return a BPE `tokenizer.json` with byte fallback and spaces as `▁`, like those of Llama 2 and Gemma."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    specials = ["<unk>", *special]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    bare.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=pieces, show_progress=False))
    content = json.loads(bare.to_str())
    content["added_tokens"] = []
    content["model"].update(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made = Tokenizer.from_str(json.dumps(content))
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    if "<s>" in special:
        bos = [("<s>", made.token_to_id("<s>"))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    return str(made.to_str())


def save_huggingface(folder: Path, serialized: str, *, chat_template: str | None = None, **named: str | None) -> Path:
    """Save a tokenizer as `save_pretrained` does, and return its folder. `named` has the bos, eos and pad tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(serialized, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": named.get(name) for name in ("bos", "eos", "pad")},
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
        "model_max_length": 1_000_000,
    }
    given = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(given), encoding="utf-8")
    return folder


TIKTOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def tiktoken_ranks() -> bytes:
    """Return a small tiktoken file. Its tokens are those of `byte_level_json`, in the order of their merges."""
    decode = decoders.ByteLevel().decode
    vocabulary = Tokenizer.from_str(byte_level_json((), style="llama3")).get_vocab()
    singles = [bytes([byte]) for byte in range(256)]
    merged = [decode([piece]).encode() for piece, _ in sorted(vocabulary.items(), key=lambda entry: entry[1])]
    tokens = [*singles, *(token for token in merged if len(token) > 1 and "\ufffd" not in token.decode())]
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(dict.fromkeys(tokens)))


def save_tiktoken(folder: Path, special=(), **named: str) -> Path:
    """Save a tiktoken file and its JSON sidecar, and return its path. `named` has the bos, eos and pad tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = tiktoken_ranks()
    start = ranks.count(b"\n")
    settings = {
        "pattern": TIKTOKEN_PATTERN,
        "special_tokens": {text: start + place for place, text in enumerate(special)},
        **{f"{key}_token": text for key, text in named.items()},
    }
    path = folder / "tokenizer.tiktoken"
    path.write_bytes(ranks)
    Path(f"{path}.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def _byte_level(folder: Path, style: str) -> Path:
    return save_huggingface(folder / "hf", byte_level_json(ENDED, style=style), eos=ENDED[0])


def _metaspace(folder: Path, scheme: str) -> Path:
    content = metaspace_json(("<s>", "</s>", *PRIMER_TOKENS), scheme=scheme)
    return save_huggingface(folder / "hf", content, bos="<s>", eos="</s>")


ENDED = ("<|endoftext|>", *PRIMER_TOKENS)
KINDS: dict[str, Callable[[Path], Path]] = {
    "user_defined": save_sentencepiece,
    "control": functools.partial(save_sentencepiece, control=PRIMER_TOKENS, user_defined=()),
    "tiktoken": functools.partial(save_tiktoken, special=ENDED, eos=ENDED[0]),
    **{style: functools.partial(_byte_level, style=style) for style in ("gpt2", "llama3")},
    **{scheme: functools.partial(_metaspace, scheme=scheme) for scheme in ("first", "always", "never")},
}
"""Functions that save a tokenizer of each kind in a folder, with the special tokens of the template `primer`."""
