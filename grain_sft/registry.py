"""Registry: a table of alternatives by name, such as orders or layouts, to which other packages can add entries."""

import contextlib
import difflib
import hashlib
import importlib
import io
import multiprocessing
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import cloudpickle

from grain_sft.errors import GrainSftError

Entry = TypeVar("Entry")

_FOLDER = str(Path(__file__).parent)
_OF_PROCESS = os.urandom(16)
_WORDS: dict[Any, str] = {Callable: "a class or a function", type: "a class"}  # words for types in messages


class Registry(Generic[Entry]):
    """Entries by name, such as "packed" in `LAYOUTS`. The name `package.module:Name` imports an entry from another package.

    Args:
      noun: Singular noun for messages, such as "order".
      error: Class of the errors that the table raises.
      entries: Built-in entries by name. The text `package.module:Name` in place of an entry is imported on first use.
      adapt: Function that gets an object that was registered or imported, and its name, and returns the entry. By default, the
        object itself is the entry.
      kinds: Types that a registered or imported object may have.
      base: Base class of entries that are classes, and of the objects that `make` returns.
    """

    def __init__(
        self,
        noun: str,
        error: type[GrainSftError],
        entries: Mapping[str, Entry | str],
        adapt: Callable[[Any, str], Entry] = lambda entry, name: entry,
        kinds: tuple[Any, ...] = (Callable,),
        base: type = object,
    ) -> None:
        self._noun, self._error, self._adapt, self._kinds, self._base = noun, error, adapt, kinds, base
        self._entries: dict[str, Entry | str] = dict(entries)

    def register(self, name: str, entry: Entry) -> Entry:
        """Add an entry, and return it. The name must not be taken, and must have no colon.

        Every process of a run has to register the entry, worker processes included.
        """
        if not isinstance(name, str) or not name or ":" in name or name in self._entries:
            raise self._error(f"{self._noun} {name!r}: expected a name without ':' that is not taken. Choose another.")
        self._entries[name] = self._adapted(name, entry)
        return entry

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a name. Raise the table's error if it has no such entry, or if it can't be imported."""
        entry = None
        if isinstance(name, str):  # a config may have a list in place of a name
            entry = name if ":" in name else self._entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(str(name), list(self._entries), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            if multiprocessing.parent_process() is not None:
                hint += f" A worker process does not know the {self._noun}s that other processes register."
            expected = f"one of {', '.join(self._entries)}, or package.module:Name"
            raise self._error(f"{self._noun} {name!r}: expected {expected}.{hint}")
        if isinstance(entry, str):
            entry = self._imported(entry)
            if name in self._entries:  # a name `package.module:Name` is not stored
                self._entries[name] = entry
        return entry

    def _imported(self, name: str) -> Entry:
        module, _, attribute = name.partition(":")
        try:
            imported = getattr(importlib.import_module(module), attribute)
        except (Exception, SystemExit) as error:
            cause = f"{type(error).__name__}: {error}"
            remedy = "Install its package, add its folder to PYTHONPATH, or fix the name."
            raise self._error(f"{self._noun} {name!r} cannot be imported: {cause}. {remedy}") from error
        return self._adapted(name, imported)

    def _adapted(self, name: str, value: Any) -> Entry:
        """Return the entry for a registered or imported object. Raise the table's error if its type or base class is wrong."""
        if not isinstance(value, self._kinds):
            expected = " or ".join(_WORDS.get(kind, kind.__name__) for kind in self._kinds)
            article = "an" if (kind := type(value).__name__)[0] in "aeiou" else "a"
            raise self._error(f"{self._noun} {name!r} is {article} {kind}; expected {expected}. Fix the name.")
        entry = self._adapt(value, name)
        if isinstance(entry, type):
            self._check_base(name, entry)
        return entry

    def make(self, entry: Entry | str, *arguments: Any, **options: Any) -> Any:
        """Call `entry`, or the entry of the name `entry`, and return the result. Errors are those of `entry_errors`."""
        constructor: Any = self[entry] if isinstance(entry, str) else entry
        name = entry if isinstance(entry, str) else name_of(constructor)
        with entry_errors(self._error, f"{self._noun} {name!r} can't be made", "Fix its options, or its code."):
            instance = constructor(*arguments, **options)
        self._check_base(name, type(instance))
        return instance

    def _check_base(self, name: str, kind: type) -> None:
        if not issubclass(kind, self._base):
            expected = f"a subclass of {self._base.__module__.partition('.')[0]}'s {self._base.__name__}"
            raise self._error(f"{self._noun} {name!r} is of class {kind.__name__}; expected {expected}. Derive it from that.")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@contextlib.contextmanager
def entry_errors(error: type[GrainSftError], what: str, fix: str) -> Iterator[None]:
    """Turn an exception of an entry's code into `error`. GrainSftErrors and MemoryErrors stay as they are.

    The message begins with `what`, such as "order 'mine', epoch 3", and ends with the sentence `fix`. Between them are the
    exception and the last line of its traceback that is not in grain_sft.
    """
    try:
        yield
    except (GrainSftError, MemoryError):
        raise
    except Exception as raised:
        frames = reversed(traceback.extract_tb(raised.__traceback__))
        text = str(raised).removesuffix(".") or "no message"
        outside = (f" ({frame.filename}:{frame.lineno})" for frame in frames if not frame.filename.startswith(_FOLDER))
        raise error(f"{what}: {type(raised).__name__}: {text}{next(outside, '')}. {fix}") from raised


def name_of(entry: Any) -> str:
    """Return the name of a class or function, such as "my_package.orders:Zigzag"; the repr of an object of another type."""
    return f"{entry.__module__}:{entry.__qualname__}" if hasattr(entry, "__qualname__") else repr(entry)


def is_ours(entry: Any) -> bool:
    """Return whether a class or function is part of this package."""
    return str(getattr(entry, "__module__", "")).startswith("grain_sft.")


def code_sha256(entry: Any, state: Any = None) -> str | None:
    """Return a hash of an entry's code, and of the values in `state`; None for an entry of this package.

    It is the SHA-256 of the entry's file, and of the pickle of `state`. Without a file, as in a notebook, or if the entry is
    not a class or a function, such as a `functools.partial`, the entry itself is pickled too.
    """
    if is_ours(entry):
        return None
    module = getattr(getattr(entry, "func", entry), "__module__", "")  # `func` is the function of a `functools.partial`
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    content = file.read_bytes() if file.is_file() else b""
    if not content or state is not None or not isinstance(entry, type | types.FunctionType):
        pickled = io.BytesIO()
        try:
            _Pickler(pickled).dump((entry, state))
        except Exception:  # for example, a lock in a closure cannot be pickled
            pickled.write(_OF_PROCESS)
        content += pickled.getvalue()
    return hashlib.sha256(content).hexdigest()


class _Pickler(cloudpickle.Pickler):
    """Pickler whose bytes are the same in all processes. They do not restore the object.

    cloudpickle gives a class of a notebook another number in each process, and a set has another order in each.
    """

    _seen: tuple[type, ...] = ()

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if not isinstance(value, type) or value.__module__ != "__main__":
            return None
        members = [] if value in self._seen else [each for each in vars(value).items() if each[0] != "_abc_impl"]
        self._seen = *self._seen, value  # a method that calls `super()` holds its class
        return value.__qualname__, value.__bases__, members


def table_of(kind: Any) -> Registry[Any] | None:
    """Return the `Registry` in a type such as `Annotated[str, ORDERS]`; None for a type without one."""
    return next((meta for meta in get_args(kind)[1:] if isinstance(meta, Registry)), None)
