"""Options of a constructor or function, read from its signature and from the `Args:` of its docstring.

Config checks, command-line options, documentation, and JSON Schema are derived from these options.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from grain_sft.errors import ConfigError, shortened
from grain_sft.registry import table_of

REQUIRED: Any = inspect.Parameter.empty
"""Default of an option that has to be given."""

# an entry of `Args:`: its names, its first line, and the lines after it that are empty or indented
_ARGUMENTS = re.compile(r"^(\w+(?:, \w+)*): (.*(?:\n(?: .*)?)*)", re.MULTILINE)
# words for types and bounds in messages
_WORDS: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}
_WORDS |= {dict: "a mapping", list: "a list"}
_BOUNDS = {"ge": "{} or more", "gt": "more than {}", "le": "at most {}", "lt": "less than {}", "min_length": "not empty"}


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
      name: Name of the argument, which is also the key in a config.
      type: Type of the values in a config, such as `Annotated[int, msgspec.Meta(ge=1)]`. An option that names an order has the
        type `Annotated[str, ORDERS]`.
      default: Value of an option that is not given, or `REQUIRED`.
      help: Text of the option in `Args:`, on one line.
    """

    name: str
    type: Any
    default: Any
    help: str


Options = Mapping[str, Option]
Section = Mapping[str, Any]
"""Section of a config: values of options by name."""


@functools.cache
def options_of(declaration: Callable[..., Any]) -> Options:
    """Return the options of a function, a class, or a `msgspec.Struct`, in the order of the signature.

    Raises:
      ConfigError: The declaration has no signature.
    """
    function = inspect.unwrap(declaration.__init__ if isinstance(declaration, type) else declaration)  # type: ignore[misc]
    hints = get_type_hints(declaration, include_extras=True) if is_struct(declaration) else {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(Exception):  # a type under `if TYPE_CHECKING`, or an annotation that is not a type
            hints |= get_type_hints(alone, getattr(function, "__globals__", {}), include_extras=True)
    texts = _help_texts(inspect.getdoc(declaration) or "")
    try:
        parameters = inspect.signature(declaration).parameters
    except ValueError:  # functions written in C, such as `getattr`, may have none
        name = f"{declaration.__module__}:{declaration.__qualname__}"
        raise ConfigError(f"{name} has no signature to read options from. Name an object written in Python.") from None
    return {
        name: Option(name, _checkable(_config_type(hints.get(name, Any))), _default(parameter), texts.get(name, ""))
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def help_in_configs(option: Option) -> str:
    """Return the help text of an option for configs, with `null` in place of Python's None."""
    return re.sub(r"\bNone\b", "`null`", option.help)


def is_struct(kind: Any) -> bool:
    """Return whether a type is a `msgspec.Struct`, which is a section with options."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _default(parameter: inspect.Parameter) -> Any:
    factory = getattr(parameter.default, "factory", None)  # in a `msgspec.Struct`
    return parameter.default if factory is None else factory()


def _help_texts(doc: str) -> dict[str, str]:
    """Return the entries of a docstring's `Args:`, each on one line."""
    lines = doc.partition("\nArgs:\n")[2].splitlines()
    indented = itertools.takewhile(lambda line: not line or line.startswith(" "), lines)
    entries = _ARGUMENTS.findall(textwrap.dedent("\n".join(indented)))
    # "start, stop: ..." is the entry of both names
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def _config_type(hint: Any) -> Any:
    """Return the type of an argument's values in a config: a list for a tuple, `Any` for a class that a config can't state."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(_config_type(arguments[0]), *arguments[1:])]
    if origin in (Union, types.UnionType):
        # A class is left out of a union: for `str | Tokenizer`, a config can only state the text.
        members = [member for member in map(_config_type, arguments) if member is not Any]
        # only None is left of `Tokenizer | None`
        return Any if {*members} <= {type(None)} else Union[tuple(members)]  # noqa: UP007
    if origin in (list, tuple, Sequence, Iterable):
        # the items of `tuple[int, str]` have several types, so they are not checked
        return list[_config_type(arguments[0])] if len({*arguments} - {...}) == 1 else list[Any]  # type: ignore[misc]
    if origin in (dict, Mapping):
        return dict[str, _config_type(arguments[1])] if arguments else dict  # type: ignore[misc]
    return hint if origin is Literal or hint in list(_WORDS) or is_struct(hint) else Any  # a list, because `[int]` has no hash


def _checkable(kind: Any) -> Any:
    """Return a type; `Any` if `msgspec` can't check its values, such as those of `list[int] | list[str]` or `Literal[1.5]`."""
    try:
        msgspec.json.Decoder(kind)
    except TypeError:
        return Any
    return kind


def check(section: object, options: Options, where: str, *, require: bool = True) -> None:
    """Raise a `ConfigError` if a section has an unknown key, or a value that its option does not accept.

    Args:
      where: Name of the section for messages, such as "a.yaml: sampler".
      require: Whether a missing option is an error if it has no default.
    """
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} is {shortened(repr(section))}; expected a section with {', '.join(options)}.")
    check_keys(section, options, where)
    for name, option in options.items():
        if name in section:
            # for the key `layout`, "a.yaml" becomes "a.yaml: layout"; for the key `kind` in `layout`, "a.yaml: layout.kind"
            check_value(section[name], option.type, f"{where}.{name}" if ": " in where else f"{where}: {name}")
        elif require and option.default is REQUIRED:
            raise ConfigError(f"{where} lacks the key {name!r}. Add it.")


def check_keys(section: Mapping[Any, Any], known: Iterable[str], where: str) -> None:
    """Raise a `ConfigError` if a key of `section` is not among `known`."""
    names = list(known)
    for key in section:
        if key not in names:
            hint = _nearest(key, names) or " Expected no keys."
            raise ConfigError(f"{where}: unknown key {key!r}.{hint} Fix or remove it.")


def _nearest(word: object, known: list[str]) -> str:
    """Return a sentence with the word of `known` nearest to `word`; "" if `known` is empty."""
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.0)
    return f" The nearest known: {near[0]!r}." if near else ""


def check_value(value: object, kind: Any, where: str) -> None:
    """Raise a `ConfigError` if a value is not of the type `kind`.

    Sections, lists, mappings and names of a table's entries are checked here, and all other values by `msgspec`.
    """
    kinds = kinds_of(kind)
    for member in kinds:
        origin, table = get_origin(member), table_of(member)
        if is_struct(member) and isinstance(value, Mapping):
            check(value, options_of(member), where)
            return
        if origin is list and isinstance(value, list):
            for number, item in enumerate(value):
                check_value(item, get_args(member)[0], f"{where}[{number}]")
            return
        if origin is dict and isinstance(value, Mapping):
            for key, item in value.items():
                if not isinstance(key, str):  # such as `no`, which is a bool in YAML
                    raise ConfigError(f"{where}: a key is {shortened(repr(key))}; expected text. Put it in quotes.")
                check_value(item, get_args(member)[1], f"{where}.{key}")
            return
        # neither the name of an entry, nor package.module:Name
        if table is not None and isinstance(value, str) and value not in table and ":" not in value:
            raise ConfigError(f"{where} is {value!r}; expected {expected(member)}.{_nearest(value, list(table))}")
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):  # UnicodeEncodeError: the text has half of a surrogate pair
        words = " or ".join(dict.fromkeys(map(expected, kinds)))
        raise ConfigError(f"{where} is {shortened(repr(value))}; expected {words}.") from None


def kinds_of(kind: Any) -> list[Any]:
    """Return the members of a union without None: [int, str] for int | str | None, and [int] for int."""
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [each for each in members if each is not type(None)]


def expected(kind: Any) -> str:
    """Return a description of the values of a type."""
    origin, arguments, table = get_origin(kind), get_args(kind), table_of(kind)
    if table is not None:
        return f"one of {', '.join(table)}, or package.module:Name"
    if origin is Annotated:
        metas = [meta for meta in arguments[1:] if isinstance(meta, msgspec.Meta)]
        bounds_of_metas = [(text, getattr(meta, name)) for meta in metas for name, text in _BOUNDS.items()]
        bounds = [text.format(bound) for text, bound in bounds_of_metas if bound is not None]
        return expected(arguments[0]) + (f" ({', '.join(bounds)})" if bounds else "")
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if is_struct(kind):
        return f"a section with {', '.join(options_of(kind))}"
    return _WORDS.get(origin or kind) or str(kind)


def struct_of(name: str, options: Options) -> type[msgspec.Struct]:
    """Return the options as a frozen `msgspec.Struct` that refuses unknown fields."""
    fields: list[Any] = []
    for option in options.values():
        table = table_of(option.type)
        # a name in the table, or any text with a colon
        open_names = {"anyOf": [{"enum": list(table)}, {"pattern": ":"}]} if table is not None else None
        meta = msgspec.Meta(description=help_in_configs(option), extra_json_schema=open_names)
        kind: Any = Annotated[(option.type, meta)]
        # in the schema, a default such as `Host(0, 1)` is null
        default = option.default if isinstance(option.default, str | int | float) else None
        fields.append((option.name, kind) if option.default is REQUIRED else (option.name, kind, default))
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


def add_arguments(parser: Any, options: Options, spelled: Mapping[str, Iterable[str]] | None = None) -> None:
    """Add each option to a parser or a group of arguments. An option whose type is a union takes the first type of the union.

    `spelled` has the flags of options, such as {"seed": ["-s", "--seed"]}. The default flag of `chunk_size` is `--chunk-size`.
    """
    for option in options.values():
        flags = (spelled or {}).get(option.name) or [f"--{option.name}".replace("_", "-")]
        kind = kinds_of(option.type)[0]
        settings: dict[str, Any] = {"required": True} if option.default is REQUIRED else {"default": option.default}
        if get_origin(kind) is list:
            settings["nargs"], kind = "+", get_args(kind)[0]
        unbounded = get_args(kind)[0] if get_origin(kind) is Annotated else kind  # int for Annotated[int, Meta(ge=1)]
        if unbounded is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif get_origin(unbounded) is Literal:
            settings["choices"] = get_args(unbounded)
        else:
            settings["type"] = functools.partial(parsed, unbounded, kind)
            settings["metavar"] = "NAME" if unbounded is str else "N"
        help_text = option.help.removesuffix(".")
        if not help_text[1:2].isupper():  # lower case, as in argparse's own texts, unless it begins with an acronym
            help_text = help_text[:1].lower() + help_text[1:]
        if option.default not in (REQUIRED, None, ""):
            values = option.default if isinstance(option.default, list | tuple) else [option.default]
            help_text += f" (default: {' '.join(map(str, values))})"  # "8 950" for (8, 950), as a user would type it
        parser.add_argument(*flags, dest=option.name, help=help_text.replace("%", "%%"), **settings)


def parsed(kind: type[Any], bounded: Any, text: str) -> Any:
    """Return a command-line argument as a value of the type `kind`, within the bounds of the annotated type `bounded`."""
    found = shortened(repr(text))
    try:
        value = kind(text)
        check_value(value, bounded, found)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{found}: expected {str(error).rpartition('; expected ')[2]}") from error
    except ValueError:
        raise argparse.ArgumentTypeError(f"{found}: expected {_WORDS[kind]}.") from None
    return value
