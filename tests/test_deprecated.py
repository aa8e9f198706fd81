"""Former names work for one more version, and the warning gives the new one."""

import importlib
import subprocess
import sys

import pytest

from grain_sft import deprecated


@pytest.mark.parametrize(("former", "new"), deprecated.MODULES.items())
def test_a_former_module_is_the_new_one(former, new):
    sys.modules.pop(f"grain_sft.{former}", None)
    with pytest.warns(DeprecationWarning, match=f"is now grain_sft.{new}"):
        found = importlib.import_module(f"grain_sft.{former}")
    assert found is importlib.import_module(f"grain_sft.{new}") and found.__spec__.name == f"grain_sft.{new}"


def test_former_names_are_found_by_import_and_as_attributes():
    program = "import grain_sft; from grain_sft.mixture import MixtureSource; print(grain_sft.trace.trace.__module__)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "grain_sft.provenance.lines\n"
