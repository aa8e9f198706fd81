"""Templates by name. A template makes the tokens of a conversation, and the loss of each token."""

import functools
from collections.abc import Sequence

import numpy as np

from grain_sft.arguments import as_integer, check_type
from grain_sft.errors import PrepareError, RecordError
from grain_sft.prepare.records.conversation import Conversation
from grain_sft.prepare.request import TemplateOptions
from grain_sft.prepare.templates.chat import as_template
from grain_sft.prepare.templates.template import Rendered, Result, Template, result_of, results_of
from grain_sft.prepare.tokenizers import Tokenizer
from grain_sft.registry import Registry, entry_errors, is_ours, name_of

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
_make = functools.lru_cache(maxsize=8)(TEMPLATES.make)  # a preparation renders many batches with one template


def render(
    template: type[Template], conversations: Sequence[Conversation], tokenizer: Tokenizer, options: TemplateOptions
) -> list[Result]:
    """Return the document of each conversation, or the RecordError that explains why it has no document.

    Raises:
      PrepareError: The template can't be used with this tokenizer or these options, or makes too many or too few documents.
    """
    made: Template = _make(template, tokenizer, options)
    if not conversations:  # the caller checks only that the template can be made
        return []
    if is_ours(template):  # only the templates of other packages are checked
        return made.render(conversations)
    name = f"template {name_of(template)}"
    as_integer(f"{name}: min_tokens", template.min_tokens, 0, PrepareError)
    with entry_errors(PrepareError, name, "Fix its code."):
        results = results_of(made.render, conversations)
        if len(results) != len(conversations):
            problem = f"{name} made {len(results)} documents of {len(conversations)} conversations"
            raise PrepareError(f"{problem}; expected one of each. Fix its code.")
        for result in results:
            check_type(f"{name}: a result", result, Rendered | RecordError, "a Rendered or a RecordError")
        # tokens and loss may be anything
        return [result_of(_checked, result, template, name, tokenizer.vocab_size) for result in results]


def _checked(result: Result, template: type[Template], name: str, vocab_size: int) -> Result:
    """Return a result of another package's template. Raise a RecordError if its token ids or its loss are invalid."""
    if isinstance(result, RecordError):
        return result
    ids, loss = np.asarray(result.tokens), np.asarray(result.loss)
    wrong_loss = loss[~np.isfinite(loss) | (loss < 0) if template.weighted else (loss != 0) & (loss != 1)]
    problem = ""
    if len(wrong := ids[(ids < 0) | (ids >= vocab_size)]):
        problem = f"made the id {wrong[0]}; expected 0 to {vocab_size - 1}"
    elif ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        problem = f"made tokens of shape {ids.shape} and dtype {ids.dtype}; expected integers of one dimension"
    elif loss.shape != ids.shape:
        problem = f"made loss of shape {loss.shape}; expected {ids.shape}, that of the tokens"
    elif len(wrong_loss):
        expected = "a finite number, 0 or more" if template.weighted else "0 or 1, or `weighted = True` in the class"
        problem = f"made the loss {wrong_loss[0]}; expected {expected}"
    elif not template.masked and not loss.all():
        problem = "made a token without loss; expected loss for every token, or `masked = True` in the class"
    if problem:
        raise RecordError(f"{name} {problem}. Fix its code.")
    return result
