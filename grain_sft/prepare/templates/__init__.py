"""Templates by name. A template makes the tokens of a conversation, and the loss of each token."""

import functools
from collections.abc import Sequence

import numpy as np

from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.conversation import Conversation
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.chat import as_template
from grain_sft.prepare.templates.template import Rendered, Result, Template, result_of
from grain_sft.prepare.tokenizers import Tokenizer
from grain_sft.registry import Registry, is_ours

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
_make = functools.lru_cache(maxsize=8)(TEMPLATES.make)  # cached for the batches of a preparation


def render(
    template: type[Template], conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions
) -> list[Result]:
    """Return the document of each conversation, or the RecordError that explains why it has no document.

    Raises:
      PrepareError: The template can't be used with this tokenizer or these options.
    """
    results: list[Result] = _make(template, tokenizer, options).render(conversations)
    if is_ours(template):
        return results
    return [result_of(_checked, result, template, tokenizer.vocab_size) for result in results]


def _checked(result: Result, template: type[Template], vocab_size: int) -> Result:
    """Return a result of another package's template. Refuse token ids that are not in [0, `vocab_size`)."""
    if not isinstance(result, RecordError):
        ids = np.asarray(result.tokens)
        if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
            name = f"{template.__module__}:{template.__qualname__}"
            raise RecordError(f"template {name} made the id {wrong[0]}; expected 0 to {vocab_size - 1}. Fix its code.")
    return result
