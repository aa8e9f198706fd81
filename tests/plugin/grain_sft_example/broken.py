"""Entries that grain_sft refuses: of a wrong class, or with a constructor that raises, a wrong attribute or a wrong result."""

import grain

from grain_sft.corpus import Format
from grain_sft.layout import Layout
from grain_sft.observers import Observer
from grain_sft.prepare.templates import Template


class Plain:
    """A class that derives from nothing."""


def plain(*arguments: object, **options: object) -> Plain:
    """Return an object of a class that derives from nothing."""
    return Plain()


class _Raising:
    def __init__(self, *arguments: object, **options: object) -> None:
        raise KeyError("no such language")


class RaisingMap(_Raising, grain.transforms.Map):
    def map(self, element: object) -> object:
        return element


class RaisingLayout(_Raising, Layout):
    pass


class RaisingObserver(_Raising, Observer):
    pass


class RaisingFormat(_Raising, Format):
    pass


class NoneTemplate(Template):
    def render(self, conversations: list) -> list:
        return [None for each in conversations]


class CutTemplate(NoneTemplate):
    truncation = "middle"


class RaisingTemplate(_Raising, NoneTemplate):
    pass
