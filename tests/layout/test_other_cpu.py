"""`ties="numpy:avx2"` replays the rows that OLMo-core makes on a CPU with AVX2. Other values name other CPUs.

OLMo-core sorts documents by length with numpy. The order of equal lengths depends on the CPU's instructions.
"""

import json
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from packed_corpora import PACKED_CASES, PLAN_CASE, write_case
from test_packed_olmo import GOLDEN, layout_of, playable, run_variant, values_of

from grain_sft.errors import LayoutError
from grain_sft.layout.packing import numpy_sort
from grain_sft.layout.packing.numpy_sort import argsorts
from grain_sft.layout.plan import depends_of, make_plan

MANY = next(case for case in PACKED_CASES if case.name == "log-normal, many")
LENGTHS = -np.random.default_rng(0).integers(1, 500, 20_000)
needs_avx2 = pytest.mark.skipif("avx2" not in playable(), reason="this CPU has no AVX2")


def golden_of(variant: str, case) -> dict:
    """Return the golden values of a case. Skip the test if there are none, or if this CPU can't run the variant."""
    key = f"numpy {np.__version__}, {variant}"
    if key not in GOLDEN or variant not in playable():
        pytest.skip(f"this CPU has no {variant}, or the golden file has no {key}")
    return GOLDEN[key][case.name]


@pytest.mark.parametrize("case", [case for case in PACKED_CASES if case.has_ties], ids=lambda case: case.name)
@pytest.mark.parametrize("variant", numpy_sort.SORTS)
def test_every_row_is_the_row_that_olmo_core_makes_on_the_named_cpu(tmp_path, variant, case):
    golden = golden_of(variant, case)
    # If this process sorts like `variant`, plain "numpy" has the same rows.
    for ties in (f"numpy:{variant}", *["numpy"] * (variant == numpy_sort.numpy_sort())):
        assert values_of(case, tmp_path / ties, ties) == golden


ON_A_LESSER_CPU = """
import json, sys
(case,) = (case for case in tests.PACKED_CASES if case.name == sys.argv[3])
print(tests.numpy_sort(), json.dumps(tests.values_of(case, tests.Path(sys.argv[1]), f"numpy:{sys.argv[2]}")))
"""


def test_a_process_whose_numpy_lacks_features_can_still_sort_with_all_features_of_its_cpu(tmp_path):
    best = playable()[0]
    golden = golden_of(best, MANY)
    sort, found = run_variant("baseline", ON_A_LESSER_CPU, str(tmp_path / "corpus"), best, MANY.name).split(" ", 1)
    assert sort == "baseline" and json.loads(found) == golden


def test_no_process_is_started_where_numpy_already_sorts_like_the_named_cpu(monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    for ties in ("stable", "numpy", f"numpy:{numpy_sort.numpy_sort()}"):
        assert argsorts(ties, [LENGTHS, LENGTHS]) == [None, None]


@needs_avx2
def test_one_process_sorts_all_groups(tmp_path, monkeypatch):
    started = mock.Mock(side_effect=subprocess.run)
    monkeypatch.setattr(subprocess, "run", started)
    case = PLAN_CASE._replace(group=1)
    layout = layout_of(case, tmp_path, "numpy:baseline", write_case(case, tmp_path))
    assert len(layout) and len(layout.corpus.shards) == 5
    assert started.call_count == 1


@needs_avx2
def test_a_child_process_sorts_empty_and_single_lengths_whatever_features_are_enabled_here(monkeypatch):
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "")
    monkeypatch.setenv("NPY_ENABLE_CPU_FEATURES", os.environ.get("NPY_ENABLE_CPU_FEATURES", "AVX2"))
    found = argsorts("numpy:baseline", [np.zeros(0, np.int64), np.array([-7]), np.array([-1, -9, -3])])
    assert [each.tolist() for each in found] == [[], [0], [1, 2, 0]]


def test_the_sort_of_a_better_cpu_than_this_one_is_refused(tmp_path):
    if "avx512" in playable():
        pytest.skip("this CPU has AVX-512")
    with pytest.raises(LayoutError, match=r"ties='numpy:avx512': this CPU has no AVX-512.*from_olmo_core"):
        layout_of(MANY, tmp_path, "numpy:avx512", write_case(MANY, tmp_path))
    assert not list((tmp_path / "cache").rglob("*.arrays"))


def test_the_fingerprint_of_a_plan_names_the_sort_and_the_version_of_numpy(tmp_path, monkeypatch):
    written = write_case(PLAN_CASE, tmp_path)
    expected = {f"numpy:{variant}": {"version": np.__version__, "sort": variant} for variant in playable()}
    expected |= {"stable": None, "numpy": {"version": np.__version__, "sort": numpy_sort.numpy_sort()}}
    for ties, sort in expected.items():
        layout = layout_of(PLAN_CASE, tmp_path, ties, written)
        assert depends_of(layout.finder, layout.packing)["numpy"] == sort
        assert (f"numpy='{np.__version__} " in repr(layout)) == (ties != "stable")
        np.testing.assert_array_equal(make_plan(layout.finder, layout.packing)["start"], layout.plans[0].start)
    assert len(list((tmp_path / "cache").rglob("*.arrays"))) == len(expected)
    layout = layout_of(PLAN_CASE, tmp_path, "numpy", written)
    monkeypatch.setattr(numpy_sort, "numpy_sort", lambda: "another")
    assert depends_of(layout.finder, layout.packing)["numpy"]["sort"] == "another"


WRONG_SCRIPTS = [
    ("echo 1.26.4 baseline", "started with numpy 1.26.4; expected"),
    ("echo broken >&2; exit 3", r"ended with status 3 \(broken\)"),
    (f"echo {np.__version__} baseline; exit 0", r"ended with status 0 \(no message\)"),
    (f"echo {np.__version__} AVX2 X86_V3", "was compiled for CPUs with AVX2"),
]


@needs_avx2
@pytest.mark.parametrize(("script", "message"), WRONG_SCRIPTS)
def test_a_process_that_cannot_sort_is_an_error(tmp_path, monkeypatch, script, message):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(LayoutError, match=message):
        argsorts("numpy:baseline", [LENGTHS])


FEATURES = [
    (["X86_V3", "X86_V4", "AVX512_ICL"], "X86_V4 AVX512_ICL", "X86_V4 AVX512_ICL X86_V3"),  # numpy 2.4
    (["SSE41", "AVX2", "AVX512F", "AVX512_SKX"], "AVX512F AVX512_SKX", "AVX512F AVX512_SKX AVX2"),  # 2.0 to 2.3
    (["ASIMDHP", "SVE"], "", ""),  # ARM
]


@pytest.mark.parametrize(("dispatched", "avx2", "baseline"), FEATURES)
def test_disabled_features_have_the_names_that_this_numpy_gives_them(monkeypatch, dispatched, avx2, baseline):
    monkeypatch.setattr(numpy_sort, "_dispatched", dispatched)
    assert [numpy_sort.disabled_for(sort) for sort in numpy_sort.SORTS] == ["", avx2, baseline]
