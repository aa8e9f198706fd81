"""Rendering a unit of conversations: a pure function, run in this process, in others, or by Beam."""

from __future__ import annotations

import base64
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare import chunk
from grain_sft.prepare.conversation import Conversation
from grain_sft.prepare.inputs import Input, Unit, read_records
from grain_sft.prepare.request import Request
from grain_sft.prepare.schema import read_record
from grain_sft.prepare.templates import TEMPLATES, Rendered, Template, TemplateOptions, render
from grain_sft.prepare.tokenizers import Tokenizer, load_tokenizer

BATCH = 256  # conversations that are tokenized together

_NO_LOSS, _TOO_SHORT = 1, 2  # places in chunk.DROPPED


@dataclasses.dataclass(frozen=True)
class Work:
    """What every unit's documents depend on, small enough to send to a worker."""

    request: Request
    inputs: tuple[Input, ...]
    key: str

    @functools.cached_property
    def template(self) -> Template:
        """The template that the request names.

        Raises:
          PrepareError: there is none of that name, or it has not the options that the request gives.
        """
        found = TEMPLATES.get(self.request.template)
        if found is None:
            raise PrepareError(f"template {self.request.template!r}: expected one of {', '.join(TEMPLATES)}.")
        for name in ("seq_level_weight", "condition", "chat_template", "system_prompt"):
            if getattr(self.request, name) and name not in found.options:
                having = [each.name for each in TEMPLATES.values() if name in each.options]
                raise PrepareError(
                    f"{name} is an option of template {', '.join(having)}, not of {found.name}. Leave it out, or choose "
                    "another template."
                )
        return found

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded when first asked for."""
        return load_tokenizer(self.request.tokenizer)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """The smallest unsigned dtype that holds every id."""
        return np.min_scalar_type(max(1, self.tokenizer.vocab_size - 1))

    @property
    def drops_untrainable(self) -> bool:
        """Whether documents without a token that takes loss are left out, as open-instruct and OpenChat do."""
        return self.request.format == "olmo" or self.template.trim_trailing


class Renderer:
    """Makes the chunk of one unit after the other."""

    def __init__(self, work: Work) -> None:
        request = work.request
        self._work = work
        self._template = work.template
        self._options = TemplateOptions(
            special_text=request.special_text,
            seq_level_weight=request.seq_level_weight,
            condition=request.condition,
            chat_template=request.chat_template,
            system_prompt=request.system_prompt,
        )
        self._messages = "messages" if self._template.schemas == ("messages",) else "chat"
        self._keep = request.keep or self._template.truncation

    def chunk(self, unit: Unit, first: int) -> bytes:
        """The unit's chunk.

        Args:
          first: number of the unit's first record in its input.

        Raises:
          RecordError: a bad record, if the request is to stop at it: its file and line, and what is wrong.
          CorpusFileError: the input can't be read.
        """
        made = _Made(self._work)
        batch: list[tuple[int, Any, Conversation]] = []
        for line, raw in read_records(self._work.inputs[unit.input], unit, first):
            try:
                conversation = self.read(raw)
            except RecordError as error:
                self._flush(batch, unit, made)  # an earlier record may be bad too, and comes first
                self._reject(unit, line, raw, error, made)
                continue
            batch.append((line, raw, conversation))
            if len(batch) == BATCH:
                self._flush(batch, unit, made)
        self._flush(batch, unit, made)
        return made.encode(np.dtype(np.float32 if self._template.weighted else np.bool_))

    def read(self, raw: object) -> Conversation:
        """The conversation of a record as the inputs give it.

        Raises:
          RecordError: It is not JSON, or not of the request's schema.
        """
        return read_record(raw, self._work.request.schema, messages=self._messages)

    def render(self, conversations: Sequence[Conversation]) -> list[Rendered | RecordError]:
        """Documents of the conversations, uncut."""
        return render(self._template, conversations, self._work.tokenizer, self._options)

    def _flush(self, batch: list[tuple[int, Any, Conversation]], unit: Unit, made: _Made) -> None:
        for (line, raw, _), result in zip(batch, self.render([entry[2] for entry in batch]), strict=True):
            if isinstance(result, RecordError):
                self._reject(unit, line, raw, result, made)
            else:
                self._keep_document(line, result, made)
        batch.clear()

    def _keep_document(self, line: int, result: Rendered, made: _Made) -> None:
        """Cut a document to its length, count what falls out, and keep the rest or drop it."""
        tokens, loss = result.tokens, result.loss
        total, total_trainable = len(tokens), int(np.count_nonzero(loss))
        most = self._work.request.max_length
        if most is not None and total > most:
            part = slice(total - most, None) if self._keep == "last" else slice(0, most)
            tokens, loss = tokens[part], loss[part]
        if self._template.trim_trailing:
            places = np.flatnonzero(loss)
            end = int(places[-1]) + 1 if len(places) else 0
            tokens, loss = tokens[:end], loss[:end]
        length, trainable = len(tokens), total_trainable
        if length != total:
            trainable = int(np.count_nonzero(loss))
        dropped = 0
        if not trainable and self._work.drops_untrainable:
            dropped = _NO_LOSS
        elif length < self._template.min_tokens:
            dropped = _TOO_SHORT
        if dropped:
            made.records.append((line, 0, 0, total, total_trainable, dropped))
            return
        made.records.append((line, length, trainable, total - length, total_trainable - trainable, 0))
        made.tokens.append(tokens)
        made.loss.append(loss)

    def _reject(self, unit: Unit, line: int, raw: Any, error: RecordError, made: _Made) -> None:
        path = self._work.inputs[unit.input].path
        if self._work.request.on_error == "stop":
            raise RecordError(f"{path}:{line}: {error}") from error
        made.rejected.append({"file": path, "line": line, "reason": str(error), **_as_json(raw)})


class _Made:
    """What a unit has given so far."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.records: list[tuple[int, ...]] = []
        self.tokens: list[chunk.Tokens] = []
        self.loss: list[chunk.Loss] = []
        self.rejected: list[dict[str, Any]] = []

    def encode(self, loss_dtype: np.dtype[Any]) -> bytes:
        records = np.array(self.records, chunk.RECORD)
        return chunk.encode(
            self._work.key,
            records,
            self.tokens,
            self.loss,
            self.rejected,
            token_dtype=self._work.token_dtype,
            loss_dtype=loss_dtype,
            eos_token_id=self._work.tokenizer.eos_token_id,
        )


def _as_json(raw: Any) -> dict[str, Any]:
    """A rejected record as JSON can hold it: its text, or base64 of bytes that are no UTF-8."""
    if not isinstance(raw, bytes):
        return {"record": repr(raw)}
    try:
        return {"record": raw.decode()}
    except UnicodeDecodeError:
        return {"record_base64": base64.b64encode(raw).decode()}
