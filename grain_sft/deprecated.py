"""Former names of modules, arguments and attributes. They work for one more version, with a warning that gives the new name."""

import functools
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from grain_sft.errors import WrongTypeError

Decorated = TypeVar("Decorated")

MODULES = {
    "iteration": "pipeline.iterator",
    "materialize": "prepare.materialize",
    "metrics": "observers.metrics",
    "receipt": "pipeline.receipt",
    "sources": "source",
    "trace": "provenance",
    "trace.audit": "provenance.audit",
    "trace.audit_check": "provenance.audit_check",
    "remote_files": "storage.remote.retries",
    "corpus.learning_rate": "replay.learning_rate",
    "corpus.remote_options": "storage.remote_options",
}
"""Paths in `grain_sft` of moved modules: new path by former path."""

MIXTURE = {"MixtureCorpus": "corpus.mixture", "MixtureLayout": "layout.mixture", "MixtureSource": "source"}
"""Names of the former module `grain_sft.mixture`, each with its new module in `grain_sft`."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of modules by their former path."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        # the package is compared too, because "trace" alone is a module of Python
        is_former = package == "grain_sft" and name in (*MODULES, "mixture")
        return importlib.machinery.ModuleSpec(fullname, self) if is_former else None

    def exec_module(self, module: ModuleType) -> None:
        """Warn, and replace `module` in `sys.modules` by the module at the new path.

        The module `mixture` is not replaced, because its names are in several new modules: it gets these names as attributes.
        """
        former = module.__name__
        names = MIXTURE if former == "grain_sft.mixture" else {}
        paths = names.values() or [MODULES[former.removeprefix("grain_sft.")]]
        new = [f"grain_sft.{path}" for path in paths]
        warnings.warn(f"{former} is now {', '.join(new)}. Import that.", DeprecationWarning, stacklevel=2)
        if not names:
            sys.modules[former] = importlib.import_module(new[0])  # the import system returns this entry
        for name, path in names.items():
            setattr(module, name, getattr(importlib.import_module(f"grain_sft.{path}"), name))


def install() -> None:
    """Make former module paths importable."""
    # The finder has to come before Python's own finder. `grain_sft.trace` is the package `provenance`, so Python's finder would
    # load `provenance/audit.py` a second time, as the module `grain_sft.trace.audit`.
    sys.meta_path.insert(0, _Finder())


def renamed_arguments(**names: str) -> Callable[[type[Decorated]], type[Decorated]]:
    """Return a decorator that lets the constructor of a class also accept arguments by their former names.

    In `renamed_arguments(when_dry="on_exhausted")`, `when_dry` is the former name, and `on_exhausted` is the new name.
    """

    def decorate(decorated: type[Decorated]) -> type[Decorated]:
        """Replace the constructor of a class by one that also takes the former names, and return the class."""
        function = vars(decorated)["__init__"]

        @functools.wraps(function)
        def call(*args: Any, **arguments: Any) -> None:
            for former in names.keys() & arguments.keys():
                if names[former] in arguments:
                    raise WrongTypeError(f"{former}= and {names[former]}= are the same argument. Pass {names[former]}= only.")
                warnings.warn(f"{former}= is now {names[former]}=.", DeprecationWarning, stacklevel=2)
                arguments[names[former]] = arguments.pop(former)
            function(*args, **arguments)

        decorated.__init__ = call  # type: ignore[method-assign]
        return decorated

    return decorate


def renamed_attribute(old: str, new: str) -> property:
    """Return a property that reads the attribute `new` of its object, with a deprecation warning.

    `old` is the former name of the attribute in the warning, such as "PackedLayout.recipe".
    """

    def get(self: object) -> Any:
        warnings.warn(f"{old} is now {new}. Read that.", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(get)
