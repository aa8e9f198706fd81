"""Templates by name. A template makes the tokens of a conversation, and the loss of each token."""

import functools
from collections.abc import Sequence

from grain_sft.errors import PrepareError
from grain_sft.prepare.records.messages import Conversation
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
    """Return the document of each conversation, or the RecordError that explains why it has none.

    Raises:
      PrepareError: The template can't be used with this tokenizer or these options.
    """
    return _template_with(template, tokenizer, options).render(conversations)


@functools.lru_cache(maxsize=8)
def _template_with(template: type[Template], tokenizer: Tokenizer, options: TemplateOptions) -> Template:
    """Return the template for a tokenizer and options, cached: a preparation renders many batches with the same ones."""
    instance: Template = TEMPLATES.make(template, tokenizer, options)
    return instance
