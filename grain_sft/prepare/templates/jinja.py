"""The Jinja environment of chat templates: sandboxed, with the functions that transformers gives to templates.

It does not use transformers, so that templates render equally with every kind of tokenizer and every version of transformers.
"""

import json
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from grain_sft.errors import PrepareError


class Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the assistant's texts.

    Attributes:
      tracked: Blocks of text rendered so far, and spans of marked text, to which the tag appends; None records no spans.
    """

    tags = {"generation"}  # noqa: RUF012
    tracked: ClassVar[tuple[list[str], list[tuple[int, int]]] | None] = None

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_generated"), [], [], body).set_lineno(line)

    def _generated(self, caller: Any) -> str:
        text = str(caller())
        if self.tracked is not None:
            blocks, spans = self.tracked
            start = sum(map(len, blocks))
            spans.append((start, start + len(text)))
        return text


class Namespace(jinja2.utils.Namespace):
    """A namespace without underscored attributes, by which templates could leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*values, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace can't have the attribute {name!r}")
        super().__setitem__(name, value)


def raise_exception(message: str) -> None:
    """Refuse a conversation, on behalf of a template."""
    raise jinja2.exceptions.TemplateError(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


NO_DATE = jinja2.Undefined(name="strftime_now")
ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
ENVIRONMENT.filters["tojson"] = to_json
ENVIRONMENT.globals |= {"raise_exception": raise_exception, "namespace": Namespace}


def compile_template(text: str) -> jinja2.Template:
    """Compile a chat template."""
    try:
        return ENVIRONMENT.from_string(text)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise PrepareError(f"the chat template is not a valid Jinja template: {error} (line {line}).") from error


def words_of(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys that a template reads, and the words that it compares texts with."""
    nodes, tree = jinja2.nodes, ENVIRONMENT.parse(text)
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    names = {node.attr for node in tree.find_all(nodes.Getattr)} | constants
    compared = {
        inner.value
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test))
        for inner in node.find_all(nodes.Const)
        if isinstance(inner.value, str) and inner.value.strip()
    }
    return frozenset(names), frozenset(compared)
