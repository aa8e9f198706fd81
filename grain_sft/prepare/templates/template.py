"""Base classes of templates. A template makes the tokens of a conversation and the loss of each token."""

import abc
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.conversation import CALLS, DOCUMENT, OPTIONAL, Conversation
from grain_sft.prepare.records.strict_json import shown, strings
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.tokenizers import Tokenizer

T = TypeVar("T")

Ids = npt.NDArray[np.uint32]


class Rendered(msgspec.Struct, frozen=True):
    """A document that a template made.

    Attributes:
      tokens: uint32 [n].
      loss: bool or float32 [n]. `loss[i]` belongs to `tokens[i]`: nothing is shifted yet.
      text_bytes: Number of UTF-8 bytes of the text of a plain document; None for a conversation.
    """

    tokens: Ids
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
      options: Names of the `TemplateOptions` that apply to this template, but not to all templates.
      masked: Whether some tokens may take no loss.
      weighted: Whether the loss is an array of float32 weights. Otherwise, it is a bool mask.
      truncation: Which tokens of a too long document are kept, "first" or "last".
      trim_trailing: Whether the tokens after the last token with loss are cut off, and documents without loss are dropped.
      min_tokens: Length of the shortest document that is kept.
      tool_calls: Whether the template is meant for conversations with tool calls.
      learned: Roles whose messages take loss, if the loss is a mask.
      jinja: Text of the Jinja template, if the template's entry in `TEMPLATES` is Jinja text; otherwise None.

    Args:
      tokenizer: Tokenizer of the texts.
      options: Options of the user, also in the attribute `chosen`.

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
        self.special = SpecialText(tokenizer.special_tokens if options.special_text == "error" else ())

    @abc.abstractmethod
    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        """Return the document of each conversation, or the RecordError that explains why it has no document.

        If it raises a RecordError, each conversation is rendered alone.
        """

    def check(self, conversation: Conversation) -> None:
        """Raise a RecordError for a role that `roles` lacks, a second system text, or a text that spells one of `special`."""
        first = conversation.messages[0].role
        if first == DOCUMENT and DOCUMENT not in self.roles:
            raise RecordError(f"is a plain document; template {self.name} renders conversations. Give --template text.")
        if first != DOCUMENT and DOCUMENT in self.roles:
            raise RecordError(f"is a conversation; template {self.name} renders plain documents. Give --template hf.")
        for index, message in enumerate(conversation.messages):
            where, role = f"messages[{index}]", message.role
            if role not in self.roles:
                raise RecordError(f"{where}.role: {role!r}; template {self.name} expects one of {', '.join(self.roles)}.")
            self.special.check(message.content, f"{where}.content")
            if message.extra:
                self.special.check(message.extra, where)
        if conversation.system and first == "system":
            raise RecordError("system: the record has a system text, and a message of the role 'system'. Remove one.")
        for where in ("system", "condition", "tools"):
            self.special.check(getattr(conversation, where), where)

    def losses(self, conversation: Conversation) -> list[bool]:
        """Return whether each message takes loss. A message takes loss if its role is in `learned` and its weight is not 0.

        Raises:
          RecordError: No message has a role in `learned`, a message of another role has weight 1, or a weight is neither 0
            nor 1.
        """
        learned = [message.role in self.learned for message in conversation.messages]
        for index, message in enumerate(conversation.messages):
            if message.weight not in (None, 0, 1) or (message.weight and not learned[index]):
                expected = "0 or 1" if learned[index] else f"0, except for {' and '.join(self.learned)}"
                where = f"messages[{index}].weight: {message.weight:g}"
                raise RecordError(f"{where}; expected {expected}. Template openchat has weights of any size.")
        if not any(learned):
            roles = " or ".join(repr(role) for role in self.learned if role in self.roles)
            raise RecordError(f"messages: no message has the role {roles}, so no token takes loss. Remove the record.")
        return [is_learned and message.weight != 0 for is_learned, message in zip(learned, conversation.messages, strict=True)]

    def refuse_calls(self, conversation: Conversation, rendered: str = "") -> None:
        """Refuse a conversation with tools, tool calls or thoughts.

        `rendered` is the one key of these that the template renders; "" for none.
        """
        # a second fix, which helps only with tool calls
        fix = dict.fromkeys(CALLS, " Or write calls in the role 'assistant_toolcall', for --template episode_tool.")
        if conversation.tools:
            raise RecordError(f"tools: template {self.name} does not render them. {unread('tools')}")
        for index, message in enumerate(conversation.messages):
            for key in OPTIONAL:
                if key != rendered and message.extra and message.extra.get(key):
                    problem = f"messages[{index}].{key}: template {self.name} does not render it"
                    raise RecordError(f"{problem}. {unread(key)}{fix.get(key, '')}")

    def ids_of(self, spellings: Collection[str]) -> list[Ids]:
        """Return [id] for each special token. Raise a PrepareError that names those that the tokenizer lacks."""
        if missing := [text for text in spellings if self.tokenizer.token_id(text) is None]:
            problem = f"template {self.name}: the tokenizer has no special token {', '.join(missing)}"
            raise PrepareError(f"{problem}. Train one that has it (grain-sft train-tokenizer), or change the template.")
        return [as_array([self.tokenizer.special_tokens[text]]) for text in spellings]


RENDER_IT = "Choose a Jinja template that renders it (--template FILE.jinja)."


def unread(key: str) -> str:
    """Return the last sentences of an error message about a key of a record that the template does not render."""
    return f"{RENDER_IT} To ignore it: --schema 'chat:{key}='."


Piece = tuple[str | list[int] | Ids, float]
"""Part of a document: a text to encode or token ids, and the loss of every token of the part."""


class PiecesTemplate(Template):
    """Template that joins `pieces`, and encodes the texts of all conversations in one call."""

    def __init__(self, tokenizer: Tokenizer, options: TemplateOptions) -> None:
        super().__init__(tokenizer, options)
        self._is_forbidden = np.zeros(tokenizer.vocab_size, np.bool_)  # ids that no text may become
        self.forbid(tokenizer.control_ids)

    def forbid(self, ids: Iterable[int]) -> None:
        """Refuse texts whose encoding has one of these ids."""
        self._is_forbidden[list(ids)] = True

    @abc.abstractmethod
    def pieces(self, conversation: Conversation) -> list[Piece]:
        """Return the pieces of a conversation that `check` has accepted, or raise a RecordError."""

    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        return results_of(self._render_together, conversations)

    def _render_together(self, conversations: Sequence[Conversation]) -> list[Result]:
        """Return the result of `render`. Raise a RecordError if a text of any conversation can't be encoded."""
        checked = [result_of(self._checked_pieces, conversation) for conversation in conversations]
        accepted = [pieces for pieces in checked if not isinstance(pieces, RecordError)]
        texts = [value for pieces in accepted for value, _ in pieces if isinstance(value, str)]
        encoded = iter(self._encode(texts))

        def document(pieces: list[Piece]) -> Rendered:
            ids = [next(encoded) if isinstance(value, str) else as_array(value) for value, _ in pieces]
            return self.document(pieces, ids)

        return [pieces if isinstance(pieces, RecordError) else result_of(document, pieces) for pieces in checked]

    def _checked_pieces(self, conversation: Conversation) -> list[Piece]:
        self.check(conversation)
        return self.pieces(conversation)

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text. Raise a RecordError if a text can't be encoded, or has a forbidden id."""
        encoded = self.tokenizer.encode_arrays(texts)
        if encoded and self._is_forbidden.take(np.concatenate(encoded)).any():
            text = next(text for text, ids in zip(texts, encoded, strict=True) if self._is_forbidden.take(ids).any())
            raise RecordError(f"messages: {shown(text)} becomes a special token of this tokenizer. Change it.")
        return encoded

    def document(self, pieces: list[Piece], ids: Sequence[Ids]) -> Rendered:
        """Return the document of `pieces`, whose token ids are `ids`, or raise a RecordError."""
        weights = np.array([weight for _, weight in pieces], np.float32 if self.weighted else np.bool_)
        return Rendered(np.concatenate(ids), np.repeat(weights, [len(part) for part in ids]))


def as_array(ids: list[int] | Ids) -> Ids:
    """Return ids as uint32, or as Python objects if an id does not fit. `templates.render` refuses such an id."""
    try:
        return np.asarray(ids, np.uint32)
    except OverflowError:
        return np.array(ids, object)


def result_of(function: Callable[..., T], *args: Any) -> T | RecordError:
    """Return the result of `function(*args)`, or the RecordError that it raises."""
    try:
        return function(*args)
    except RecordError as error:
        return error


def results_of(render: Callable[..., Iterable[Result]], conversations: Sequence[Conversation]) -> list[Result]:
    """Return the results of `render`. If it raises a RecordError, call it for each conversation, so that the others succeed."""
    try:
        return list(render(conversations))
    except RecordError as error:
        if len(conversations) == 1:
            return [error]
        return [result for conversation in conversations for result in results_of(render, [conversation])]


class SpecialText:
    """Finder of special tokens in text.

    `find` first looks for the first characters of the tokens. This check takes 0.2 ns for each character of the text. A search
    for `pattern` takes up to 13 ns for each character, so `find` searches only if the check finds something.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        self.spellings = frozenset(spelling for spelling in spellings if spelling)
        self.pattern = any_of(self.spellings)
        self._first = tuple({spelling[0] for spelling in self.spellings})

    def find(self, text: str) -> re.Match[str] | None:
        """Return the first special token that `text` spells."""
        for character in self._first:
            if character in text:
                return self.pattern.search(text)
        return None

    def check(self, value: object, where: str) -> None:
        """Raise a RecordError if a string in the JSON `value` spells a special token. `where` is the path of `value`."""
        if not self.spellings or value is None or (type(value) is str and self.find(value) is None):
            return
        for path, text in strings(value, where):
            if token := self.find(text):
                problem = f"{path}: spells the special token {token.group()!r} at character {token.start()}"
                raise RecordError(f"{problem}. Remove it, or encode it as ordinary text with --special-text encode.")


def any_of(texts: Iterable[str], pattern: str = "{}") -> re.Pattern[str]:
    """Compile `pattern`, with {} replaced by the alternatives `texts`, longest first. Without texts, nothing matches."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile(pattern.format("|".join(map(re.escape, longest_first)) or "(?!)"))
