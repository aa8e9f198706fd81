"""The Jinja environment of chat templates: a sandbox with the functions that transformers gives to templates.

This module does not import transformers, so a template renders the same text with every version of transformers.
"""

import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from grain_sft.errors import PrepareError

MARKS = "grain_sft_marks"
"""Variable with two texts, which the tag {% generation %} writes before and after its block."""


class Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the assistant's texts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Return a block that calls `_generated` with the text between the tag and {% endgeneration %}."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_generated", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _generated(self, context: jinja2.runtime.Context, caller: Any) -> str:
        before, after = context.get(MARKS, ("", ""))
        return f"{before}{caller()}{after}"


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace. Names that begin with an underscore are refused: they would let a template leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args  # a template may give an attribute named `self`
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*values, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace can't have the attribute {name!r}")
        super().__setitem__(name, value)


def raise_exception(message: str) -> None:
    """Refuse a conversation. Templates call this function."""
    raise jinja2.exceptions.TemplateError(message)


def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Return `value` as JSON. Jinja's own `tojson` escapes the characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


NO_DATE = jinja2.Undefined(name="strftime_now")
"""Value of `strftime_now`, the function for today's date. A template can test whether it is defined. A call is an error,
because tomorrow's corpus would differ."""

ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
)
ENVIRONMENT.filters["tojson"] = to_json
ENVIRONMENT.globals |= {"raise_exception": raise_exception, "namespace": Namespace}


def compile_template(text: str, name: str) -> jinja2.Template:
    """Return the compiled text of the template `name`. Raise a PrepareError if the text is not a Jinja template."""
    try:
        return ENVIRONMENT.from_string(text)
    except Exception as error:  # deeply nested blocks raise a `RecursionError`, or a `SyntaxError` of Python
        place = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        problem = f"template {name}: the chat template is not a valid Jinja template: {error}{place}"
        raise PrepareError(f"{problem}. Fix it, or give another.") from error


def marks_turns(text: str) -> bool:
    """Return whether a template has {% generation %}, the only tag that calls a method of an extension."""
    return ENVIRONMENT.parse(text).find(jinja2.nodes.ExtensionAttribute) is not None


def literals_of(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the keys that a template may read, and the words that it may look for in texts.

    The words are the strings in its comparisons, calls, filters and tests: "</think>" in `'</think>' in content`.
    """
    nodes = jinja2.nodes
    tree = ENVIRONMENT.parse(text)
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    keys = {node.attr for node in tree.find_all(nodes.Getattr)} | constants
    compared = {
        inner.value
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test))
        for inner in node.find_all(nodes.Const)
        if isinstance(inner.value, str) and inner.value.strip()
    }
    return frozenset(keys), frozenset(compared)
