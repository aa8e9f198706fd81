"""The page of config keys says what the code takes."""

import importlib.util
import inspect

import doc_pages as pages
import pytest

from grain_sft import IndexSampler, open_corpus
from grain_sft.config import keys
from grain_sft.errors import CorpusError
from grain_sft.layout import LAYOUTS
from grain_sft.storage.remote_options import RemoteOptions
from grain_sft.transforms import TRANSFORMS

TABLES = {
    "corpus": (keys.CORPUS, open_corpus),
    "sampler": (keys.SAMPLER, IndexSampler),
    **{f"layout {kind}": (table, LAYOUTS[kind]) for kind, table in keys.LAYOUT_OPTIONS.items()},
    **{f"transform {name}": (table, TRANSFORMS[name]) for name, table in keys.TRANSFORM_OPTIONS.items()},
}


def config_page():
    spec = importlib.util.spec_from_file_location("config_page", pages.DOCS / "config_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_those_of_the_code():
    page = pages.read("config.md")
    assert config_page().written(page) == page, "run python docs/config_page.py"


def test_every_table_of_keys_is_on_the_page():
    page = pages.read("config.md")
    for name in config_page().TABLES:
        assert page.count(f"<!-- keys: {name} -->") == 1
    tables = [value for value in vars(keys).values() if isinstance(value, dict) and value]
    tables += [table for group in (keys.LAYOUT_OPTIONS, keys.TRANSFORM_OPTIONS) for table in group.values()]
    for table in tables:
        if all(isinstance(each, keys.Key) for each in table.values()):
            assert not table or table in config_page().TABLES.values(), list(table)


@pytest.mark.parametrize("meaning", ["", "no sentence"])
def test_a_key_without_a_meaning_is_refused(meaning):
    with pytest.raises(ValueError, match="expected a sentence"):
        keys.Key(int, 0, meaning)


@pytest.mark.parametrize("name", TABLES)
def test_defaults_are_those_of_the_class_that_takes_them(name):
    table, make = TABLES[name]
    parameters = inspect.signature(make).parameters
    differ = {"path_remap", "schedule", "batch_rows"}  # an empty one and none are the same; filled in by the config
    shared = [key for key in table if key in parameters and key not in differ]
    for key in shared:
        stated, taken = table[key].default, parameters[key].default
        assert stated == taken or (taken is inspect.Parameter.empty and not isinstance(stated, int)), key
    if name.startswith(("layout", "transform")):
        assert set(table) == set(parameters) - {"corpus", "sequence_length", "cache_dir"}


def test_every_layout_and_transform_has_a_table():
    assert keys.LAYOUT["kind"].kind == tuple(LAYOUTS) == tuple(keys.LAYOUT_OPTIONS)
    assert tuple(TRANSFORMS) == tuple(keys.TRANSFORM_OPTIONS)


def test_the_keys_of_remote_files_are_those_that_are_taken(tmp_path):
    cache = {"folder": str(tmp_path), "max_bytes": "1GiB", "unit": "4MiB"}
    given = {"seconds": 1, "requests": 2, "cache": cache}
    RemoteOptions.of(given)
    assert [*given, *(f"cache.{key}" for key in cache)] == list(keys.REMOTE)
    for wrong, message in ({"x": 1}, "seconds, requests, cache"), ({"cache": {"x": 1}}, "folder, max_bytes, unit"):
        with pytest.raises(CorpusError, match=f"expected {message}"):
            RemoteOptions.of(wrong)
    limits = RemoteOptions().limits
    assert (keys.REMOTE["seconds"].default, keys.REMOTE["requests"].default) == (limits.seconds, limits.requests)
