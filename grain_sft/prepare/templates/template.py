"""Base classes of templates, which render conversations as tokens and their loss."""

import abc
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.messages import CALLS, DOCUMENT, Conversation
from grain_sft.prepare.records.strict_json import shown, strings
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.tokenizers import Tokenizer

Made = TypeVar("Made")


class Rendered(msgspec.Struct, frozen=True):
    """Tokens of a document, uint32 [n], and the loss of each token, bool or float32 [n], unshifted.

    `text_bytes` is the number of bytes of a plain document's text, in UTF-8; None for conversations.
    """

    tokens: npt.NDArray[np.uint32]
    loss: npt.NDArray[Any]
    text_bytes: int | None = None


Result = Rendered | RecordError


class Template(abc.ABC):
    """A way to render conversations with one tokenizer and one set of options.

    A subclass sets the class attributes whose defaults don't fit, and defines `render`.

    Attributes:
      name: Name of the template in messages.
      roles: Roles that the template renders.
      format: Default format of the corpus that is written.
      messages_schema: Default schema of records with the key 'messages'.
      options: Names of the `TemplateOptions` that this template reads, without those that every template reads.
      masked: Whether some tokens may take no loss.
      weighted: Whether the loss is float32 weights; otherwise it is a bool mask.
      truncation: Which tokens of a too long document are kept, "first" or "last".
      trim_trailing: Whether the tokens after the last one with loss are cut off. A document without loss is dropped.
      min_tokens: Length of the shortest document that is kept.
      tool_calls: Whether the template is meant for conversations with tool calls.
      learned: Roles whose messages take loss, if the loss is a mask.
      jinja: Text of a Jinja template that is an entry of the table; None for code. The corpus's key depends on it.

    Args:
      tokenizer: Tokenizer of the texts.
      options: Choices of the user.

    Raises:
      PrepareError: The template can't be used with this tokenizer or these options.
    """

    name: ClassVar[str] = "unnamed"
    roles: ClassVar[tuple[str, ...]] = ("system", "user", "assistant")
    format: ClassVar[str] = "olmo"
    messages_schema: ClassVar[str] = "chat"
    options: ClassVar[tuple[str, ...]] = ()
    masked: ClassVar[bool] = True
    weighted: ClassVar[bool] = False
    truncation: ClassVar[str] = "first"
    trim_trailing: ClassVar[bool] = False
    min_tokens: ClassVar[int] = 1
    tool_calls: ClassVar[bool] = False
    learned: ClassVar[tuple[str, ...]] = ("assistant",)
    jinja: ClassVar[str | None] = None

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        self.tokenizer = tokenizer
        self.chosen = options
        self.special = SpecialText(tokenizer.special_tokens) if options.special_text == "error" else None

    @abc.abstractmethod
    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        """Return the document of each conversation, or the RecordError that explains why it has none."""

    def check(self, conversation: Conversation) -> None:
        """Refuse records and roles that the template can't render, two system texts, and text that spells a special token."""
        first = conversation.messages[0].role
        if (first == DOCUMENT) != (DOCUMENT in self.roles):
            plain = "a plain document", "conversations", "text"
            found, expected, other = plain if first == DOCUMENT else ("a conversation", "plain documents", "hf")
            raise RecordError(
                f"the record is {found}; template {self.name} renders {expected}. Give --template {other}."
            )
        for index, message in enumerate(conversation.messages):
            if message.role not in self.roles:
                roles = ", ".join(self.roles)
                raise RecordError(
                    f"messages[{index}].role: {message.role!r}; template {self.name} expects one of {roles}."
                )
            if self.special is not None:
                self.special.check(message.content, f"messages[{index}].content")
                self.special.check(message.extra, f"messages[{index}]")
        if conversation.system is not None and first == "system":
            raise RecordError("system: the record has one, and its first message is another. Remove one of them.")
        if self.special is not None:
            for where in ("system", "condition", "tools"):
                self.special.check(getattr(conversation, where), where)

    def losses(self, conversation: Conversation) -> list[bool]:
        """Return for each message whether it takes loss: its role is in `learned`, and its weight is not 0.

        Raises:
          RecordError: No message has a role in `learned`, or a weight is one that a mask can't express.
        """
        learned = [message.role in self.learned for message in conversation.messages]
        for index, message in enumerate(conversation.messages):
            if message.weight not in (None, 0, 1) or (message.weight and not learned[index]):
                expected = "0 or 1" if learned[index] else f"0, except for {' and '.join(self.learned)}"
                where = f"messages[{index}].weight: {message.weight:g}"
                raise RecordError(f"{where}; expected {expected}. Template openchat has weights of any size.")
        if not any(learned):
            roles = " or ".join(repr(role) for role in self.learned if role in self.roles)
            raise RecordError(f"messages: none of {roles}, so nothing in it takes loss.")
        return [takes and message.weight != 0 for takes, message in zip(learned, conversation.messages, strict=True)]

    def refuse_calls(self, conversation: Conversation) -> None:
        """Refuse tool calls under the keys `CALLS`, for a template that does not render them."""
        for index, message in enumerate(conversation.messages):
            for key in CALLS:
                if message.extra and message.extra.get(key):
                    raise RecordError(
                        f"messages[{index}].{key}: template {self.name} does not render it. Choose template hf, or write each "
                        "call as a message of the role 'assistant_toolcall' for template episode_tool."
                    )

    def ids_of(self, spellings: Iterable[str]) -> list[list[int]]:
        """Return a list of one id for each special token, or raise a PrepareError that names those the tokenizer lacks."""
        spellings = list(spellings)
        if missing := [text for text in spellings if self.tokenizer.token_id(text) is None]:
            raise PrepareError(
                f"template {self.name}: the tokenizer has no special token {', '.join(missing)}. Train one that has them "
                "(grain-sft train-tokenizer), or choose another template."
            )
        return [[self.tokenizer.special_tokens[text]] for text in spellings]


Piece = tuple[str | list[int] | npt.NDArray[np.uint32], float]
"""A text to encode, or token ids; and the loss of each of its tokens."""


class PiecesTemplate(Template):
    """Base of templates that define `pieces`. It encodes the texts of all conversations of a batch in one call."""

    @abc.abstractmethod
    def pieces(self, conversation: Conversation) -> list[Piece]:
        """Return the pieces of a conversation that `check` has passed, or raise a RecordError."""

    def weights(self, ids: Sequence[Sequence[int]], weights: list[float]) -> list[float]:
        """Return the loss of each piece's tokens, given the `ids` and the loss (`weights`) of each piece."""
        return weights

    def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the ids of each text."""
        return self.tokenizer.encode(texts)

    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        """Encode the pieces of all conversations in one call. The result of a bad conversation is its error."""
        checked = [result_of(self._checked_pieces, conversation) for conversation in conversations]
        good = [each for each in checked if not isinstance(each, RecordError)]
        texts = [value for pieces in good for value, _ in pieces if isinstance(value, str)]
        try:
            encoded = iter(self.encode(texts))
        except RecordError as error:  # of one of the conversations
            one_by_one = itertools.chain.from_iterable(self.render([each]) for each in conversations)
            return [error] if len(conversations) == 1 else list(one_by_one)
        ids = [[next(encoded) if isinstance(value, str) else value for value, _ in pieces] for pieces in good]
        documents = map(functools.partial(result_of, self.document), good, ids)
        return [each if isinstance(each, RecordError) else next(documents) for each in checked]

    def refuse_control(self, text: str) -> NoReturn:
        """Raise the error of a text whose ids include a control token."""
        raise RecordError(f"messages: the text {shown(text)} becomes a special token of this tokenizer. Change it.")

    def _checked_pieces(self, conversation: Conversation) -> list[Piece]:
        self.check(conversation)
        return self.pieces(conversation)

    def document(self, pieces: list[Piece], ids: Sequence[Sequence[int]]) -> Rendered:
        """Return the document of `pieces`, given the ids of each, or raise a RecordError."""
        tokens = np.array(list(itertools.chain.from_iterable(ids)), np.uint32)
        weights: Any = self.weights(ids, [weight for _, weight in pieces])
        dtype = np.dtype(np.float32 if self.weighted else np.bool_)
        loss: Any = np.repeat(np.array(weights, dtype), [len(part) for part in ids])
        for (value, _), part in zip(pieces, ids, strict=True):
            if isinstance(value, str) and not self.tokenizer.control_ids.isdisjoint(part):
                self.refuse_control(value)
        return Rendered(tokens, loss)


def result_of(function: Callable[..., Made], *args: Any) -> Made | RecordError:
    """Return the result of `function(*args)`, or the RecordError that it raises."""
    try:
        return function(*args)
    except RecordError as error:
        return error


class SpecialText:
    """Search for special tokens in text. It takes under 0.1 us in a short text without any of their first characters."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self.spellings = frozenset(spelling for spelling in spellings if spelling)
        self.pattern = any_of(self.spellings)
        self._first = tuple({spelling[0] for spelling in self.spellings})

    def find(self, text: str) -> tuple[str, int] | None:
        """Return the first special token that `text` spells and the index of its first character, or None."""
        for character in self._first:
            if character in text:
                found = self.pattern.search(text)
                return (found.group(), found.start()) if found else None
        return None

    def check(self, value: object, where: str) -> None:
        """Refuse a parsed JSON `value` if one of its strings spells a special token."""
        if value is None or (type(value) is str and self.find(value) is None):
            return
        for path, text in strings(value, where):
            if found := self.find(text):
                raise RecordError(
                    f"{path}: spells the special token {found[0]!r} at character {found[1]}. Remove it, or have it "
                    "tokenized as ordinary text with --special-text encode."
                )


def any_of(texts: Iterable[str], pattern: str = "{}") -> re.Pattern[str]:
    """Compile `pattern` with {} replaced by an alternation of `texts`, the longest first."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile(pattern.format("|".join(map(re.escape, longest_first)) or "(?!)"))
