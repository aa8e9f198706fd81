"""Receipt: everything that decides the batches of a run, as texts and as a short hash."""

import dataclasses
import hashlib
import json
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from grain_sft.arguments import check_type
from grain_sft.errors import PipelineError
from grain_sft.html_table import html_facts
from grain_sft.layout import RECEIPT_VERSION as VERSION
from grain_sft.layout import Layout, digest
from grain_sft.pipeline.amendments import Amendment, begins_before
from grain_sft.registry import entry_errors, name_of
from grain_sft.sampling import Sampler
from grain_sft.source import MixtureSource, NpyDataSource


@dataclasses.dataclass(frozen=True)
class Receipt:
    """Everything that decides the global batches of a run.

    Runs with the same receipt have the same batches. Runs with different receipts may also have the same batches.

    A receipt includes the spans of each row, and the sizes and the ends of the token files (`Corpus.ends_fingerprint`). If the
    layout finds documents by EOS tokens, it also includes a hash of all tokens. Otherwise, a change in the middle of a token
    file does not change the receipt.

    A receipt leaves out paths, threads, caches, the options of packing, and a seed that is not used. A receipt includes the
    number of hosts only if the order of rows depends on this number.

    Attributes:
      parts: Texts that describe the run, by name, in the order of the data flow: corpus, layout, padding, sampler, transforms,
        and each amendment. A mixture has a corpus, a layout and a padding for each source, such as "corpus of NAME".
      data_step: Function that returns the data step of a step. Data steps count skipped steps too: after a skip of 10 steps,
        step 100 is data step 110. The parts of a later stage state the data step at which it begins.
    """

    parts: dict[str, str]
    data_step: Callable[[int], int] = dataclasses.field(default=int, compare=False, repr=False)

    @property
    def code(self) -> str:
        """Hash of all parts, such as "gs2-3f9a0c61d2b47e55"."""
        return f"gs{VERSION}-{digest(json.dumps(self.parts))}"

    def as_dict(self) -> dict[str, Any]:
        """Return the code and the parts, JSON-ready."""
        return {"receipt": self.code, "parts": dict(self.parts)}

    def differences(self, other: Mapping[str, str], before: int | None = None) -> list[str]:
        """Return a sentence for each part in which the two receipts differ.

        Args:
          other: Parts of another receipt. In the sentences, "there" means this other receipt, and "here" means `self`.
          before: Step. Amendments and stages that begin at this step or later are not compared. None compares all of them.
        """
        check_type("other", other, Mapping, "the `parts` of another receipt")
        check_type("before", before, numbers.Integral | None, "a step, or None")
        sentences = []
        # `before` as a data step, without the steps that an amendment at `before` skips
        data_before = self.data_step(before - 1) + 1 if before else before
        for name in {**self.parts, **other}:
            stage, _, number = name.partition(": amendment ")
            # a receipt states the amendments of a stage only if they differ from those of the run
            of_run = f"amendment {number}" if number else name
            here, there = (parts.get(name if f"{stage}: amendment 1" in parts else of_run) for parts in (self.parts, other))
            # the text of a stage states its first step as a data step, and the text of an amendment as a step
            is_stage = name.startswith("stage ") and not number
            is_begun = not number or begins_before(data_before, [self.parts.get(stage, other.get(stage, ""))])
            if here != there and is_begun and begins_before(data_before if is_stage else before, (here, there)):
                sentences.append(f"{name} differs: here {here or 'nothing'}; there {there or 'nothing'}.")
        return sentences

    def __str__(self) -> str:
        return self.code

    def _repr_html_(self) -> str:
        return html_facts(f"Receipt {self.code}", self.parts)


def parts_of(source: NpyDataSource | MixtureSource, sampler: Sampler, transforms: Sequence[str]) -> dict[str, str]:
    """Return the parts of a receipt by name. `transforms` has the result of `described` for each transform."""
    layout, parts = source.layout, dict(source.layout.receipt)
    for name, part in layout.parts.items():
        parts[f"padding of {name}" if name else "padding"] = f"token {part.corpus.padding_token_id}"
    return {**parts, "sampler": sampler.receipt, "transforms": ", ".join(transforms) or "none"}


def amendment_parts(amendments: Iterable[Amendment]) -> dict[str, str]:
    """Return the parts "amendment 1", "amendment 2" and so on of a receipt."""
    return {f"amendment {number}": str(amendment) for number, amendment in enumerate(amendments, 1)}


def layout_receipt(layout: Layout) -> str:
    """Return a hash of a layout's rows and corpus, such as "rows2-3f9a0c61d2b47e55"."""
    return f"rows{VERSION}-{digest(json.dumps(layout.receipt))}"


def data_key_of(source: object, sampler: Sampler, transforms: Sequence[str]) -> str:
    """Return `Pipeline.data_key`."""
    return f"Pipeline({source!r}, {sampler.data_key}, [{', '.join(transforms)}])"


def described(transform: grain.transforms.Map) -> str:
    """Return a text that describes a transform: its repr, or its class and attributes if the class defines no repr.

    The text is the same in all processes: it has no memory addresses, and sets are sorted. If the repr abbreviates arrays, the
    text ends with a hash of their elements.
    """
    kind: Any = type(transform)
    attributes = _attributes(transform)
    with entry_errors(PipelineError, f"transform {name_of(kind)}: its repr", "Fix the `__repr__` of it or its attributes."):
        if kind.__repr__ is object.__repr__:
            arguments = ", ".join(f"{name}={_repr(value)}" for name, value in attributes.items())
            text, is_abbreviated = f"{kind.__module__}.{kind.__qualname__}({arguments})", _is_abbreviated(attributes)
        else:
            text, is_abbreviated = _repr(transform), _is_abbreviated(transform)
    arrays = _arrays(attributes) if is_abbreviated else None
    hash_of_arrays = "" if arrays is None else f"#{digest(repr(arrays))}"
    return re.sub(r" at 0x[0-9a-f]+", "", text) + hash_of_arrays


def _attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object by name, sorted by name."""
    state: Any = object.__getstate__(value)
    if isinstance(state, tuple):  # a class with slots: (attributes, slots)
        state = {**(state[0] or {}), **state[1]}
    return dict(sorted((state or {}).items()))


def _is_abbreviated(value: object) -> bool:
    """Return whether the repr of a value leaves out something: it contains "...", or floats that numpy rounds to 8 digits."""
    text = repr(value)
    with np.printoptions(floatmode="unique"):
        return "..." in text or repr(value) != text


def _repr(value: Any, parents: tuple[int, ...] = ()) -> str:
    """Return the repr of a value, with the items of sets sorted.

    Sets of numbers are not sorted, because their order is the same in all processes.
    """
    text = repr(value)
    if "{" not in text or id(value) in parents:  # `value` contains no set, or contains itself
        return text
    parents = (*parents, id(value))
    is_set = isinstance(value, set | frozenset)
    if is_set and len(value) > 1 and not all(isinstance(item, int | float) for item in value):
        return "{" + ", ".join(sorted(_repr(item, parents) for item in value)) + "}"
    inner = value if is_set or isinstance(value, Mapping | list | tuple) else _attributes(value)
    items = [*inner, *inner.values()] if isinstance(inner, Mapping) else inner
    for item in items:  # in the text, replace each item that may contain a set
        if "{" in (unsorted := repr(item)):
            text = text.replace(unsorted, _repr(item, parents))
    return text


def _arrays(value: Any, parents: tuple[int, ...] = ()) -> Any:
    """Return the arrays in `value` whose repr is abbreviated, as JSON values; None if it has no such arrays.

    A numpy array becomes [shape, hash of its bytes]. An array of another library becomes a list of its elements.
    """
    if id(value) in parents:
        return None
    parents = (*parents, id(value))
    if isinstance(value, Mapping):
        by_name = {str(name): _arrays(item, parents) for name, item in value.items()}
        return {name: arrays for name, arrays in by_name.items() if arrays is not None} or None
    if isinstance(value, list | tuple):
        return [arrays for item in value if (arrays := _arrays(item, parents)) is not None] or None
    if isinstance(value, type) or not _is_abbreviated(value):
        return None
    if not hasattr(value, "tolist"):  # an object that is not an array, but may have arrays in its attributes
        return _arrays(_attributes(value), parents)
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return value.tolist()
    # a list of 2 million integers would take 0.2 s at each checkpoint, and several times the array's memory
    return [value.shape, hashlib.sha256(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data).hexdigest()]
