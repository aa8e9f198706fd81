"""Former names work for one more version, and their warning gives the new name."""

import importlib
import sys

import pytest

import grain_sft
from grain_sft import config, deprecated
from grain_sft.errors import WrongTypeError
from grain_sft.sampling.mixture import Mixture


@pytest.mark.parametrize(("former", "new"), deprecated.MODULES.items())
def test_a_former_module_is_the_new_one(former, new):
    sys.modules.pop(f"grain_sft.{former}", None)
    with pytest.warns(DeprecationWarning, match=f"is now grain_sft.{new}"):
        found = importlib.import_module(f"grain_sft.{former}")
    assert found is importlib.import_module(f"grain_sft.{new}") and found.__spec__.name == f"grain_sft.{new}"


def test_a_former_module_is_an_attribute_of_the_package_too(monkeypatch):
    monkeypatch.delitem(sys.modules, "grain_sft.trace", raising=False)
    monkeypatch.delattr(grain_sft, "trace", raising=False)
    with pytest.warns(DeprecationWarning, match="is now grain_sft.provenance"):
        assert grain_sft.trace.trace.__module__ == "grain_sft.provenance.lines"


def test_a_module_of_the_standard_library_with_a_former_name_is_still_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "trace", raising=False)
    assert importlib.import_module("trace").__name__ == "trace"


def test_an_argument_under_both_names_is_refused():
    with pytest.raises(WrongTypeError, match="when_dry= and on_exhausted= are the same argument"):
        Mixture({}, when_dry="fail", on_exhausted="repeat")


def test_the_former_name_of_read_config_works_and_warns():
    with pytest.warns(DeprecationWarning, match="read_config"):
        assert config.stated is config.read_config
