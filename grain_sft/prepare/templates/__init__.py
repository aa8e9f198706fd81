"""Templates by name. A template makes the tokens of a conversation, and the loss of each token."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.conversation import Conversation
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.chat import as_template
from grain_sft.prepare.templates.template import Rendered, Result, Template, result_of
from grain_sft.prepare.tokenizers import Tokenizer
from grain_sft.registry import Registry

__all__ = ["TEMPLATES", "Rendered", "Result", "Template", "render", "result_of"]

TEMPLATES: Registry[type[Template]] = Registry(
    "template",
    PrepareError,
    {
        "primer": "grain_sft.prepare.templates.primer:Primer",
        "openchat": "grain_sft.prepare.templates.openchat:OpenChat",
        "episode": "grain_sft.prepare.templates.episode:Episode",
        "episode_tool": "grain_sft.prepare.templates.episode:EpisodeTool",
        "olmo": "grain_sft.prepare.templates.chat:Olmo",
        "hf": "grain_sft.prepare.templates.chat:Chat",
        "text": "grain_sft.prepare.templates.text:Text",
    },
    adapt=as_template,
    kinds=(type, str),
    base=Template,
)
"""Templates by name. An entry is a subclass of `Template`, or the text of a Jinja chat template."""


def render(
    template: type[Template], conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions
) -> list[Result]:
    """Return the document of each conversation, or the RecordError that explains why it has no document.

    A document with a token id outside of the tokenizer's vocabulary becomes a RecordError.

    Raises:
      PrepareError: The template can't be used with this tokenizer or these options.
    """
    results = _template_with(template, tokenizer, options).render(conversations)
    documents = [result.tokens for result in results if not isinstance(result, RecordError)]
    # one check of all documents, because a check of each document would take 7 us per document
    if not documents or not len(_wrong_ids(np.concatenate(documents), tokenizer.vocab_size)):
        return results
    name = f"{template.__module__}:{template.__qualname__}"
    return [result_of(_with_valid_ids, result, name, tokenizer.vocab_size) for result in results]


def _with_valid_ids(result: Result, name: str, size: int) -> Result:
    """Return `result`. If it has a token id that is not in [0, `size`), raise a RecordError that names the template."""
    if not isinstance(result, RecordError) and len(wrong := _wrong_ids(result.tokens, size)):
        raise RecordError(f"template {name} made the id {wrong[0]}; the tokenizer has 0 to {size - 1}. Fix its code.")
    return result


def _wrong_ids(tokens: npt.ArrayLike, vocab_size: int) -> npt.NDArray[Any]:
    """Return the ids that are not in [0, `vocab_size`)."""
    ids = np.asarray(tokens)
    return ids[(ids < 0) | (ids >= vocab_size)]


@functools.lru_cache(maxsize=8)
def _template_with(template: type[Template], tokenizer: Tokenizer, options: TemplateOptions) -> Template:
    """Return the template for a tokenizer and options. It is cached: a preparation renders many batches with one template."""
    instance: Template = TEMPLATES.make(template, tokenizer, options)
    return instance
