"""`Renderer`: turns records into documents (tokens and loss), and groups of units into chunks."""

import base64
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from grain_sft.arguments import check_choice, check_type
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.chunks import Contents
from grain_sft.prepare.pairs import pair_of
from grain_sft.prepare.records.conversation import Conversation
from grain_sft.prepare.records.inputs import read_records
from grain_sft.prepare.records.schema import SCHEMAS, read_record
from grain_sft.prepare.records.strict_json import decoded
from grain_sft.prepare.records.units import Input, Unit
from grain_sft.prepare.request import Request, TemplateOptions
from grain_sft.prepare.templates import TEMPLATES, Rendered, Result, Template, render, result_of
from grain_sft.prepare.tokenizers import Tokenizer, load_tokenizer
from grain_sft.prepare.writers import FORMATS, Format
from grain_sft.registry import code_sha256
from grain_sft.storage import artifact

BATCH = 1024  # maximum number of conversations that are tokenized together
BATCH_CHARACTERS = 1 << 20  # a batch ends as soon as it has more characters than this

Source = tuple[int, int]
"""Place of a record: the number of its input, from 0, and the number of its line, element or row in the input, from 1."""


@dataclasses.dataclass
class Renderer:
    """Renderer of the records of a preparation.

    Attributes:
      request: Options of the preparation.
      inputs: Scanned files of all datasets, () until they are scanned. `Unit.input` is an index into them. `read`, `render` and
        `add` need no inputs.

    Raises:
      PrepareError: The template or format does not exist, or does not take an option of the request.
    """

    request: Request
    inputs: tuple[Input, ...]

    def __post_init__(self) -> None:
        request, template, format = self.request, self.template, self.format
        for option in dataclasses.fields(TemplateOptions):
            is_read = option.name in ("special_text", "seed", *template.options)  # every template reads these two
            if not is_read and getattr(request, option.name) != option.default:
                readers = ", ".join(name for name in TEMPLATES if option.name in TEMPLATES[name].options)
                problem = f"{option.name} is an option of template {readers}, not of {request.template}"
                raise PrepareError(f"{problem}. Leave it out, or choose another template.")
        if format.max_seed is not None and request.seed > format.max_seed:
            raise PrepareError(f"seed={request.seed}: expected at most {format.max_seed} for format {request.format}.")
        if template.masked and not format.holds_loss:
            problem = f"all tokens of its files take loss, but template {request.template} leaves tokens without loss"
            fix = "Choose template text for plain documents, or a format with masks: olmo, episodes or openchat"
            raise PrepareError(f"format {request.format}: {problem}. {fix}.")
        if format.of_pairs and template.weighted:
            problem = f"template {template.name} gives tokens weights, but pairs have no weights"
            raise PrepareError(f"{problem}. Choose another template.")
        if format.of_pairs and request.max_length is not None:
            raise PrepareError("max_length: pairs are cut by their layout. Leave it out.")
        if format.of_pairs and request.fim_rate:
            raise PrepareError("fim_rate: pairs have a prompt and responses, no middle. Leave it out.")

    @functools.cached_property
    def format(self) -> Format:
        return FORMATS[self.request.format]

    @functools.cached_property
    def template(self) -> type[Template]:
        """Class of the template. Raise an error for a wrong attribute of the class."""
        template, name = TEMPLATES[self.request.template], f"template {self.request.template}"
        check_choice(f"{name}: truncation", template.truncation, ("first", "last"), PrepareError)
        check_choice(f"{name}: messages_schema", template.messages_schema, SCHEMAS, PrepareError)
        if ":" not in template.format:  # a name in `FORMATS`, not package.module:Name
            check_choice(f"{name}: format", template.format, FORMATS, PrepareError)
        for attribute in ("roles", "options", "learned"):
            check_type(f"{name}: {attribute}", getattr(template, attribute), tuple, "a tuple")
        return template

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.request.tokenizer)

    @functools.cached_property
    def code(self) -> dict[str, list[str]]:
        """Jinja text and hashes of the code of the template and the format, by name. The code of this package is left out."""
        template = list(filter(None, (self.template.jinja, code_sha256(self.template))))
        code = {f"template {self.request.template}": template, f"format {self.request.format}": self.format.code}
        return {name: hashes for name, hashes in code.items() if hashes}

    @functools.cached_property
    def key(self) -> str:
        """Hash of all that decides the corpus, including the code of a template and of a format of another package."""
        paths, digests = [entry.path for entry in self.inputs], [entry.digest for entry in self.inputs]
        code = itertools.chain.from_iterable(self.code.values())
        return artifact.hash_of([self.request.as_dict(), paths, digests, self.tokenizer.sha256, *code])

    def read(self, raw: object) -> Conversation:
        """Return the conversation of a record (JSON as bytes, or a table row). Raise a RecordError for an invalid record."""
        conversation = read_record(raw, self.request.schema, messages=self.template.messages_schema)
        if self.format.of_pairs and conversation.rejected is None:
            raise RecordError("the record is not a preference pair ('chosen' and 'rejected'). Give another --format.")
        if conversation.rejected is not None and not self.format.of_pairs:
            fix = "Give --format pairs, or train on one response with --schema prompt_completion:completion=chosen"
            raise RecordError(f"the record is a preference pair ('chosen' and 'rejected'). {fix}.")
        return conversation

    def render(self, conversations: Sequence[Conversation]) -> list[Result]:
        """Return the uncut document of each conversation, or the RecordError of a conversation that can't be rendered."""
        if not self.format.of_pairs:
            return render(self.template, conversations, self.tokenizer, self.request)
        # In a pair, a response without text is kept if it gets BOS or EOS. If it gets neither, empty="keep" would be an error
        # of the template `text`.
        options = dataclasses.replace(self.request, empty="keep" if self.request.bos or self.request.eos else "drop")
        chosen = render(self.template, conversations, self.tokenizer, options)
        # the check for None is only for mypy
        rejected_conversations = [pair.rejected for pair in conversations if pair.rejected is not None]
        rejected = render(self.template, rejected_conversations, self.tokenizer, options)
        return [result_of(pair_of, *pair) for pair in zip(chosen, rejected, strict=True)]

    def chunk(self, units: Iterable[Unit]) -> bytes:
        """Return the bytes of the chunk of a group of units."""
        contents = Contents()
        for batch in self._batches(units):
            rendered = iter(self.render([parsed for _, _, parsed in batch if not isinstance(parsed, RecordError)]))
            for source, raw, parsed in batch:
                result = parsed if isinstance(parsed, RecordError) else next(rendered)
                if isinstance(result, RecordError):
                    contents.rejected.append(self._rejected(source, raw, result))
                else:
                    self.add(source, result, contents)
        # `max` keeps the dtype unsigned if the vocabulary is empty
        token_dtype = np.min_scalar_type(max(1, self.tokenizer.vocab_size - 1))
        loss_dtype = np.dtype(np.float32 if self.template.weighted or self.format.of_pairs else np.bool_)
        return contents.encode(self.key, token_dtype, loss_dtype, self.tokenizer.eos_token_id)

    def _batches(self, units: Iterable[Unit]) -> Iterator[list[tuple[Source, Any, Conversation | RecordError]]]:
        """Yield batches of (source, record, conversation or error).

        An error ends its batch. So if the preparation stops at the error, it has rendered no later record in vain.
        """
        batch: list[tuple[Source, Any, Conversation | RecordError]] = []
        characters = 0
        for unit in units:
            for line, raw in read_records(self.inputs[unit.input], unit):
                parsed = result_of(self.read, raw)
                if not isinstance(parsed, RecordError):
                    characters += sum(len(message.content) for message in parsed.messages)
                batch.append(((unit.input, line), raw, parsed))
                if isinstance(parsed, RecordError) or len(batch) == BATCH or characters > BATCH_CHARACTERS:
                    yield batch
                    batch, characters = [], 0
        yield batch

    def _rejected(self, source: Source, raw: Any, error: RecordError) -> dict[str, Any]:
        """Return the JSON object that reports a bad record. If `on_error` is "stop", raise the error instead."""
        number, line = source
        path = self.inputs[number].path
        if self.request.on_error == "stop":
            raise RecordError(f"{path}:{line}: {error}") from error
        if isinstance(raw, RecordError):
            raw = raw.record  # bytes that could not be decoded
        text = decoded(raw) if isinstance(raw, bytes) else repr(raw)  # bytes if they are not UTF-8
        record = {"record": text} if isinstance(text, str) else {"record_base64": base64.b64encode(text).decode()}
        return {"file": path, "line": line, "reason": str(error), **record}

    def add(self, source: Source, result: Rendered, contents: Contents) -> None:
        """Cut a document to `request.max_length`, and add it to `contents`. For a dropped document, add only its `RECORD`.

        If the template has `trim_trailing`, also cut off the tokens after the last token that takes loss.
        """
        tokens, loss = result.tokens, result.loss
        total, total_trainable = len(tokens), int(np.count_nonzero(loss))
        min_length = max(self.template.min_tokens, self.request.min_length or 1)
        max_length = self.request.max_length or total
        keeps_last = (self.request.keep or self.template.truncation) == "last"
        kept = slice(-max_length, None) if keeps_last else slice(max_length)
        tokens, loss = tokens[kept], loss[kept]
        if self.template.trim_trailing:
            end = int(np.flatnonzero(loss).max(initial=-1)) + 1
            tokens, loss = tokens[:end], loss[:end]
        length, trainable = len(tokens), int(np.count_nonzero(loss))
        reason = ""
        if not total:
            reason = "no text"
        elif total > max_length and self.request.long_documents == "drop":
            reason = f"more than {max_length} tokens"
        elif not trainable and (self.template.trim_trailing or self.format.drops_untrainable):
            reason = "no trainable token"
        elif length < min_length:
            reason = f"fewer than {min_length} tokens"
        if reason:
            contents.dropped[reason] += 1
            length = trainable = 0
        else:
            contents.tokens.append(tokens)
            contents.loss.append(loss)
            if result.text_bytes is not None:
                contents.counts["text_bytes"] += result.text_bytes
                contents.counts["text_tokens"] += total
        number, line = source
        # all tokens of a dropped document count as cut
        contents.records.append((line, number, length, trainable, total - length, total_trainable - trainable))
