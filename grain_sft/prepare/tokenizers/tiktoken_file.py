"""The tokenizer of a tiktoken file. Each line of the file has a token in base64 and its rank, which is its id."""

import base64
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from grain_sft.errors import CorpusError, RecordError, import_extra
from grain_sft.prepare.tokenizers.tokenizer import Offsets, OneFileTokenizer, character_spans

FILE = "tokenizer.tiktoken"
SIDECAR = "tokenizer.tiktoken.json"

_CHARACTERS = (
    "aA\u01c5\u02b0\u4e2d\u0301\u0903\u20dd1\u2167\u00bd_-()\u00ab\u00bb!+$^\u00a9"
    " \t\r\n\x0b\x0c\u2028\u2029\x01\u00ad\ue000\u0378"
)
"""A character of each of Unicode's general categories except surrogates, and the white space of ASCII."""

# All ordered pairs of `_CHARACTERS`, to test a split pattern. The test does not find every pattern that loses text.
_ALL_PAIRS = "".join(first + second for first in _CHARACTERS for second in _CHARACTERS)

_LLAMA3_RANKS = 128_000
_LLAMA3_PROBES = {b" the": 279, b"Hello": 9906}  # ranks in Llama 3's file
_LLAMA3_NAMED = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
)
_LLAMA3_SPECIAL = (*_LLAMA3_NAMED, *(f"<|reserved_special_token_{2 + i}|>" for i in range(256 - len(_LLAMA3_NAMED))))


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the sidecar of a tiktoken file."""

    pattern: str
    special_tokens: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None


_LLAMA3 = Settings(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    {text: number for number, text in enumerate(_LLAMA3_SPECIAL, _LLAMA3_RANKS)},
    bos_token="<|begin_of_text|>",
    eos_token="<|end_of_text|>",
    pad_token="<|finetune_right_pad_id|>",
)


class TiktokenTokenizer(OneFileTokenizer):
    """Tokenizer of a tiktoken file and its sidecar.

    The sidecar of `a.tiktoken` is the JSON file `a.tiktoken.json`. It has the split pattern and the special tokens with their
    ids, under the keys of `Settings`. Llama 3's file needs no sidecar.

    Raises:
      CorpusError: The bytes are not a tiktoken file, the sidecar is missing or wrong, or the pattern loses text.
      MissingExtraError: tiktoken is not installed.
    """

    kind = "tiktoken"

    def __init__(self, contents: Mapping[str, bytes], where: str) -> None:
        super().__init__(contents, where)
        self._ranks = _parse_ranks(self._contents[FILE], where)
        settings = self._settings(self._contents.get(SIDECAR))
        special = settings.special_tokens
        names = ("bos_token", "eos_token", "pad_token")
        named = {name: text for name in names if (text := getattr(settings, name)) is not None}
        for text in named.values():
            if text not in special:
                raise CorpusError(f"{where}.json: {text!r} is not in special_tokens. Add it there.")
        self._set_special(special, named)
        self.vocab_size = max([*self._ranks.values(), *special.values()]) + 1
        self._encoding = self._load(settings.pattern)
        self._check_pattern()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Tokenizer.encode`.

        Raises:
          RecordError: The pattern can't split a text, such as a million spaces.
        """
        ids: list[list[int]] = []
        for text in texts:
            try:
                ids.append(self._encoding.encode_ordinary(text))
            except BaseException as error:  # a panic of tiktoken is not an Exception
                if type(error).__name__ != "PanicException":
                    raise
                fault = f"can't split a text of {len(text):,} characters ({error})"
                raise RecordError(f"messages: tiktoken {fault}. Break its longest run of letters or spaces.") from error
        return ids

    def token_spans(self, text: str, ids: Sequence[int]) -> tuple[Offsets, Offsets]:
        return character_spans(text, np.array([len(self._tokens[number]) for number in ids], np.int64))

    def token_text(self, number: int) -> str | None:
        data = self._tokens.get(number)
        return None if data is None else data.decode("utf-8", "surrogateescape")

    @functools.cached_property
    def _tokens(self) -> dict[int, bytes]:
        """Bytes of each token, by id."""
        special = {number: text.encode() for text, number in self.special_tokens.items()}
        return special | {rank: token for token, rank in self._ranks.items()}

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(number) for number in ids]))

    def _load(self, pattern: str) -> Any:
        tiktoken = import_extra("tiktoken", f"{self._where}: a tiktoken file", "tiktoken", "tiktoken")
        tokens = {"mergeable_ranks": self._ranks, "special_tokens": dict(self.special_tokens)}
        try:
            return tiktoken.Encoding(name=self.sha256, pat_str=pattern, **tokens)
        except Exception as error:  # such as a wrong regular expression, or an id that is not uint32
            problem = f"{self._where}: tiktoken can't load this tokenizer ({error})"
            raise CorpusError(f"{problem}. Copy its files again, or fix {self._where}.json.") from error

    def _check_pattern(self) -> None:
        """Refuse a pattern that loses text: tiktoken leaves out characters that the pattern does not match."""
        where = f"{self._where}.json: pattern"
        try:
            decoded = self.decode(self.encode([_ALL_PAIRS])[0])
        except RecordError as error:
            raise CorpusError(f"{where}: tiktoken can't use it. Remove alternatives that match no text.") from error
        if decoded != _ALL_PAIRS:
            lost = next(char for index, char in enumerate(_ALL_PAIRS) if decoded[index : index + 1] != char)
            problem = f"{where}: loses text, such as the character {lost!a}. Expected a match for every character"
            raise CorpusError(f"{problem}. Copy it again, or add the alternatives that it lacks.")

    def _settings(self, sidecar: bytes | None) -> Settings:
        """Return the settings in the sidecar. Without a sidecar, return Llama 3's settings if the ranks are Llama 3's."""
        where, keys = f"{self._where}.json", ", ".join(Settings.__struct_fields__)
        if sidecar is None:
            if len(self._ranks) == _LLAMA3_RANKS and _LLAMA3_PROBES.items() <= self._ranks.items():
                return _LLAMA3
            problem = f"{self._where}: a tiktoken file of {len(self._ranks):,} ranks without its split pattern"
            raise CorpusError(f"{problem}. Write {where} with the keys {keys}.")
        try:
            settings = msgspec.json.decode(sidecar, type=Settings)
        except msgspec.DecodeError as error:
            raise CorpusError(f"{where}: {error}. Expected an object with the keys {keys}. Write it again.") from error
        special = settings.special_tokens
        if set(self._ranks.values()) & set(special.values()) or len(set(special.values())) < len(special):
            raise CorpusError(f"{where}: special_tokens: an id is used twice or is a rank of the file. Fix the ids.")
        return settings


def _parse_ranks(content: bytes, where: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        encoded, _, decimal = line.partition(b" ")
        try:
            if not (encoded and decimal.isdigit()):  # `int` would also read "2_56"
                raise ValueError
            token, rank = base64.b64decode(encoded, validate=True), int(decimal)
        except ValueError as error:
            found = f"found {line[:40]!r}. Download the file again."
            raise CorpusError(f"{where}: line {number}: expected base64 and a rank, {found}") from error
        if ranks.setdefault(token, rank) != rank:
            raise CorpusError(f"{where}: line {number}: its token already has rank {ranks[token]}. Download it again.")
    if len(set(ranks.values())) < len(ranks):
        raise CorpusError(f"{where}: two tokens have one rank. Download the file again.")
    if missing := 256 - sum(bytes([byte]) in ranks for byte in range(256)):
        raise CorpusError(f"{where}: lacks {missing} of the 256 single bytes. Download the file again.")
    return ranks
