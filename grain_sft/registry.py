"""Registry: an open table of alternatives, such as orders or layouts, by name."""

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, get_args

from grain_sft.errors import GrainSftError

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name. A name of the form `package.module:Name` is an entry from outside, imported on first use.

    An entry carries everything that the package must know of it. No other code compares names.

    Args:
      noun: Singular noun for messages, such as "order".
      error: Class of the errors.
      entries: Built-in entries by name, or their `package.module:Name`, imported on first use.
      adapt: Function that turns a registered or imported object into an entry; by default, the object is the entry.
      kinds: Types that an object may have if it is neither a class nor a function.
    """

    def __init__(
        self,
        noun: str,
        error: type[GrainSftError],
        entries: Mapping[str, Entry | str],
        adapt: Callable[[Any], Entry] = lambda entry: entry,
        kinds: tuple[type, ...] = (),
    ) -> None:
        self._noun, self._error, self._adapt, self._kinds = noun, error, adapt, kinds
        self._entries: dict[str, Entry | str] = dict(entries)

    def register(self, name: str, entry: Entry) -> Entry:
        """Add an entry under a name that is not taken and has no colon, and return it.

        Every process of a run has to register it, worker processes included: the name `package.module:Name` needs no
        registration and is the better choice for configs.
        """
        if ":" in name or name in self._entries:
            raise self._error(f"{self._noun} {name!r}: expected a name without ':' that is not taken. Choose another.")
        self._entries[name] = self._adapted(name, entry)
        return entry

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of a name. Raise the table's error if there is none, or if it can't be imported."""
        entry = None
        if isinstance(name, str):  # a config may have a list instead
            entry = name if ":" in name else self._entries.get(name)
        if entry is None:
            near = difflib.get_close_matches(str(name), list(self._entries), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            expected = f"one of {', '.join(self._entries)}, or package.module:Name"
            raise self._error(f"{self._noun} {name!r}: expected {expected}.{hint}")
        if isinstance(entry, str):
            entry = self._imported(entry)
            if name in self._entries:
                self._entries[name] = entry
        return entry

    def _imported(self, name: str) -> Entry:
        """Return the entry that `name`, `package.module:Name`, stands for."""
        module, _, attribute = name.partition(":")
        try:
            imported = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # whatever the module raises
            remedy = "Install its package, add its folder to PYTHONPATH, or fix the name."
            raise self._error(f"{self._noun} {name!r} cannot be imported: {error}. {remedy}") from error
        return self._adapted(name, imported)

    def _adapted(self, name: str, found: Any) -> Entry:
        """Return the entry that the object `found` becomes, or raise the table's error if it is of another kind."""
        if not callable(found) and not isinstance(found, self._kinds):
            expected = " or ".join(["a class", "a function", *(kind.__name__ for kind in self._kinds)])
            raise self._error(f"{self._noun} {name!r} is a {type(found).__name__}; expected {expected}. Fix the name.")
        return self._adapt(found)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def table_of(kind: Any) -> Registry[Any] | None:
    """Return the table whose names a type takes, `ORDERS` for `Annotated[str, ORDERS]`; None for a type without a table."""
    return next((meta for meta in get_args(kind)[1:] if isinstance(meta, Registry)), None)
