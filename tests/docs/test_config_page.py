"""The page of config keys says what the code takes."""

import importlib.util

import doc_pages as pages
import pytest

from grain_sft.config.sections import SECTIONS
from grain_sft.errors import CorpusError
from grain_sft.options import options_of
from grain_sft.storage import Remote, RemoteOptions


def config_page():
    spec = importlib.util.spec_from_file_location("config_page", pages.DOCS / "config_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_those_of_the_code():
    page = pages.read("config.md")
    assert config_page().written(page) == page, "run python docs/config_page.py"
    assert config_page().schema() == pages.read("config.schema.json"), "run python docs/config_page.py"


def test_every_table_of_keys_is_on_the_page_and_explains_every_key():
    page = pages.read("config.md")
    assert {*SECTIONS, "top"} <= set(config_page().tables())
    for name, options in config_page().tables().items():
        assert page.count(f"<!-- keys: {name} -->") == 1
        for option in options.values():
            assert option.help.endswith("."), (name, option)


def test_the_keys_of_remote_files_are_those_that_are_taken(tmp_path):
    cache = {"folder": str(tmp_path), "max_bytes": "1GiB", "unit": "4MiB"}
    given = {"seconds": 1, "requests": 2, "cache": cache}
    RemoteOptions.of(given)
    options = options_of(Remote)
    assert list(options) == list(given)
    for wrong, where in ({"x": 1}, "remote"), ({"cache": {"x": 1}}, "remote: cache"):
        with pytest.raises(CorpusError, match=f"{where}: unknown key 'x'"):
            RemoteOptions.of(wrong)
    limits = RemoteOptions().limits
    assert (options["seconds"].default, options["requests"].default) == (limits.seconds, limits.requests)
