"""Templates: conversations to tokens and what takes loss, chosen by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grain_sft.errors import PrepareError
from grain_sft.prepare.conversation import Conversation
from grain_sft.prepare.templates.chat import HF, OLMO
from grain_sft.prepare.templates.episode import EPISODE, EPISODE_TOOL
from grain_sft.prepare.templates.openchat import OPENCHAT
from grain_sft.prepare.templates.plain import TEXT
from grain_sft.prepare.templates.primer import PRIMER
from grain_sft.prepare.templates.template import Rendered, Result, Template, TemplateOptions
from grain_sft.prepare.tokenizers.tokenizer import Tokenizer

__all__ = ["TEMPLATES", "Rendered", "Result", "Template", "TemplateOptions", "render"]

TEMPLATES: Mapping[str, Template] = {
    template.name: template for template in (PRIMER, OPENCHAT, EPISODE, EPISODE_TOOL, OLMO, HF, TEXT)
}


def render(
    template: Template, conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions
) -> list[Result]:
    """The document of each conversation, or in its place the RecordError that says why it has none.

    Raises:
      PrepareError: the template can't be used with this tokenizer or these options.
    """
    if options.special_text not in ("error", "encode"):
        raise PrepareError(f"special_text={options.special_text!r}: expected 'error' or 'encode'.")
    return template.render(conversations, tokenizer, options)
