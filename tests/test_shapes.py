"""Arrays have the shapes and dtypes of the signatures. jaxtyping checks them while batches are made and traced."""

import inspect
import types

import jaxtyping
import numpy as np
import pytest
from batches import sections
from beartype import beartype
from sft_files import EOS, documents, write_olmo

import grain_sft
from grain_sft import corpus, layout, pipeline, provenance, sampling, source, transforms

LAYOUTS = [
    {"kind": "windows"},
    {"kind": "packed", "long_documents": "fragment"},
    {"kind": "packed", "algorithm": "concat_then_split"},
    {"kind": "padded"},
]
ROOMS = (corpus, layout, layout.packing, source, sampling, transforms, pipeline, provenance)
PUBLIC = [getattr(room, name) for room in ROOMS for name in room.__all__]
CLASSES = [each for each in PUBLIC if inspect.isclass(each)]


def checking(function: types.FunctionType) -> types.FunctionType | None:
    """Return a copy of `function` that checks the shapes in each call, or None if its signature states no shape."""
    stated = {name: getattr(text, "__forward_arg__", text) for name, text in function.__annotations__.items()}
    shapes = {name: eval(text, vars(jaxtyping) | {"np": np}) for name, text in stated.items() if "[np.nd" in str(text)}
    if not shapes:
        return None
    copy = types.FunctionType(function.__code__, function.__globals__, "checking", closure=function.__closure__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    copy.__annotations__, copy.__qualname__ = shapes, "checking"
    return jaxtyping.jaxtyped(typechecker=beartype)(copy)


@pytest.fixture
def checked(monkeypatch) -> set[str]:
    """Names of the methods whose shapes are checked until the test ends."""
    names = set()
    for owner in {base for each in CLASSES for base in each.__mro__ if base.__module__.startswith("grain_sft")}:
        for name, function in list(vars(owner).items()):
            plain = function.__func__ if isinstance(function, staticmethod) else function  # __new__ of a NamedTuple
            if inspect.isfunction(plain) and (checks := checking(plain)):
                monkeypatch.setattr(owner, name, checks if plain is function else staticmethod(checks))
                names.add(f"{owner.__name__}.{name}")
    return names


@pytest.fixture
def load(tmp_path):
    folder = write_olmo(tmp_path / "olmo", documents(300), part_tokens=5000)
    given = {"corpus": {"eos_token_id": EOS}, "order": "shuffle", "global_batch_size": 8}
    transforms = {"transforms": ["ngram_filter", "shift_targets"]}
    return lambda layout: grain_sft.load(sections(folder, 64, layout=layout, **given) | transforms)


@pytest.mark.parametrize("stated", LAYOUTS)
def test_every_array_has_the_shape_and_dtype_of_its_signature(checked, load, stated):
    loaded = load(stated)
    made, rows = loaded.source.layout, loaded.sampler.rows(3)
    assert loaded[3]["inputs"].shape == (8, 64) and made.epoch_of(rows)[0].shape == rows.shape
    assert set(loaded.sampler.find_slots(rows, epochs=1).step) == {3}
    lines = provenance.trace(loaded, range(2))
    assert set(lines.select(lines.segment == 1).segment) == {1}
    assert len(made.rows_of_documents(np.arange(3))) > 0
    assert made.corpus.document(2).tokens.dtype == np.uint32
    assert {"Pieces.__new__", "PackedRows.__new__", "BatchSlots.__init__", "Traits.pieces", "Corpus.read"} <= checked


def test_an_array_of_another_shape_or_dtype_is_found(checked):
    three, two = np.zeros(3, np.int64), np.zeros(2, np.int64)
    for wrong in (two, three.astype(np.int32), three[:, None]):
        with pytest.raises(jaxtyping.TypeCheckError):
            layout.Pieces(three, three, three, three, wrong)
