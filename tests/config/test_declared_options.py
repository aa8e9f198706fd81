"""An option is declared once. Its checks, its command-line option and its help text derive from the declaration."""

import argparse
import functools
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import grain
import msgspec
import pytest
from batches import error_of, sections

from grain_sft.errors import ConfigError, SamplerError
from grain_sft.options import REQUIRED, add_arguments, check, options_of, struct_of
from grain_sft.registry import Registry


class Basket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A nested section.

    Args:
      size: Number of fruits.
    """

    size: Annotated[int, msgspec.Meta(ge=1)]


class Shop(grain.transforms.Map):
    """A class with options.

    Args:
      name: Name of the shop,
        on two lines.
      kind: Fruit.
      ripe, fresh: Whether it is.
      order: Order of sale.
      prices: Prices by name.
      basket: Basket of a customer.
      anything: Any JSON value.
      count: Number of sales.
    """

    def __init__(
        self,
        name: str,
        *,
        kind: Annotated[str, Registry("fruit", SamplerError, {"apple": 1, "pear": 2})] = "apple",
        ripe: bool = True,
        fresh: bool = False,
        order: Literal["up", "down"] = "up",
        prices: dict[str, float] | None = None,
        basket: Basket | None = None,
        anything: Any = None,
        count: Annotated[int, msgspec.Meta(ge=1)] = 1,
    ):
        self.name = name

    def map(self, element):
        return element


OPTIONS = options_of(Shop)


def test_options_have_the_defaults_and_the_help_texts_of_the_declaration():
    defaults = {"name": REQUIRED, "kind": "apple", "ripe": True, "fresh": False, "order": "up"}
    defaults |= {"prices": None, "basket": None, "anything": None, "count": 1}
    assert {name: option.default for name, option in OPTIONS.items()} == defaults
    assert OPTIONS["name"].help == "Name of the shop, on two lines."
    assert OPTIONS["ripe"].help == OPTIONS["fresh"].help == "Whether it is."


MISTAKES = [
    ({"name": None}, ".name is None; expected text."),
    ({"kind": "aple"}, ".kind is 'aple'; expected one of apple, pear, or package.mod"),
    ({"ripe": 1}, ".ripe is 1; expected true or false."),
    ({"prices": {"a": "b"}}, ".prices.a is 'b'; expected a number."),
    ({"prices": {1: 2}}, ".prices: a key is 1; expected text. Put it in quotes."),
    ({"basket": {"size": 0}}, ".basket.size is 0; expected an integer (1 or more)."),
    ({"basket": 3}, ".basket is 3; expected a section with size."),
]


@pytest.mark.parametrize(("section", "message"), MISTAKES)
def test_a_mistake_in_a_section_is_named(section, message):
    with pytest.raises(ConfigError) as error:
        check({"name": "x", **section}, OPTIONS, "a.yaml: shop")
    assert str(error.value).startswith(f"a.yaml: shop{message}")


def test_a_correct_section_is_accepted_and_the_command_line_has_the_same_options(capsys):
    check({"name": "x", "kind": "my.module:Fig", "basket": {"size": 1}, "anything": [{}]}, OPTIONS, "a.yaml: shop")
    assert msgspec.convert({"name": "x"}, struct_of("Shop", OPTIONS)).kind == "apple"
    parser = argparse.ArgumentParser()
    add_arguments(parser, {name: OPTIONS[name] for name in ("name", "kind", "order", "ripe", "count")})
    given = vars(parser.parse_args(["--name", "x", "--order", "down", "--no-ripe", "--count", "3"]))
    assert given == {"name": "x", "kind": "apple", "order": "down", "ripe": False, "count": 3}
    for wrong, expected in (
        (["--name", "x", "--count", "0"], "1 or more"),
        (["--name", "x", "--count", "a; b"], "argument --count: 'a; b': expected an integer.\n"),
        (["--name", "x", "--count", "x; expected y"], "argument --count: 'x; expected y': expected an integer.\n"),
        ([], "required: --name"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
        assert expected in capsys.readouterr().err


class FromOutside:
    """A user's class, with the indentation and the types of other style guides.

    Args:
        path: Path of a file,
            on two lines.
        names: Names by number.

        rate: Rate.
        **options: Options of a parent class.
    """

    def __init__(
        self,
        path: Path | Literal[1.5] | None = None,  # type: ignore[valid-type]
        names: typing.Mapping = {},  # type: ignore[type-arg]
        pair: tuple[int, str] = (1, "a"),
        rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0,
        **options: Any,
    ):
        self.path = path


class ForTypeCheckers:
    def __init__(self, tokenizer: "Undefined | None" = None, sizes: [int] = (), count: int = 1):  # type: ignore  # noqa: F821
        self.count = count


def test_a_users_class_may_have_options_of_any_type():
    options = options_of(FromOutside)
    check({"path": "a.txt", "names": {"a": 1}, "pair": [1, "a"], "rate": 0.5}, options, "a.yaml: outside")
    assert [option.help for option in options.values()] == ["Path of a file, on two lines.", "Names by number.", "", "Rate."]
    with pytest.raises(ConfigError, match=r"rate is 0\.0; expected a number \(more than 0, at most 1\)"):
        check({"rate": 0.0}, options, "a.yaml: outside")
    for declaration in (ForTypeCheckers, functools.partial(ForTypeCheckers)):
        check({"tokenizer": {}, "sizes": [2], "count": 3}, options_of(declaration), "a.yaml: outside")
    with pytest.raises(ConfigError, match="count is 'x'; expected an integer"):
        check({"count": "x"}, options_of(ForTypeCheckers), "a.yaml: outside")


def test_the_options_of_a_users_transform_are_checked(tmp_path):
    config = sections(tmp_path, 8, layout="windows") | {"transforms": [{f"{__name__}:Shop": {"name": 5}}]}
    assert "Shop.name is 5; expected text" in error_of(config)
    # the keys of an option of any type
    assert "holds no .npy file" in error_of(sections(tmp_path, 8, layout={"kind": "json:dumps", "obj": {1: 2, "a": 3}}))
