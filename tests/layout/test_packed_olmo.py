"""Best-fit decreasing packs the rows of OLMo-core's NumpyPackedFSLDataset, which make_packed_golden.py recorded.

`ties="numpy:avx2"` replays the rows that OLMo-core makes on a CPU with AVX2. Other values name other CPUs.

OLMo-core sorts documents by length with numpy. The order of equal lengths depends on the CPU's instructions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from batches import golden_values, pipeline_of
from packed_corpora import PACKED_CASES, PLAN_CASE, VARIANTS, PackedCase, digest_of_files, values_of_rows, write_case
from packed_layouts import open_case, packing_of, row_digests, write_boundaries
from python_runs import run_python

from grain_sft import Host, PackedLayout
from grain_sft.errors import LayoutError
from grain_sft.layout.packing import numpy_sort as sorts
from grain_sft.layout.packing.numpy_sort import argsorts, numpy_sort
from grain_sft.layout.plan import depends_of, make_plan
from grain_sft.provenance import trace
from grain_sft.storage import artifact

GOLDEN = golden_values("packed_rows.json")["variants"]
SOME = next(iter(GOLDEN.values()))  # any variant: they differ only in ties between documents of equal length


def layout_of(case: PackedCase, folder: Path, ties: str, written: tuple[list[Path], list[Path]]) -> PackedLayout:
    """Return the packed layout of a case. `written` is the paths of its token files and of its masks, from `write_case`."""
    corpus, cache = open_case(case, folder, written), folder / "cache"
    return PackedLayout(corpus, case.sequence_length, ties=ties, boundaries="eos", cache_dir=cache, **packing_of(case))


def values_of(case: PackedCase, folder: Path, ties: str) -> dict:
    """Return the values that the golden file holds for a case, computed by grain_sft in a new folder."""
    folder.mkdir()
    written = write_case(case, folder)
    layout = layout_of(case, folder, ties, written)
    return {"corpus": digest_of_files([*written[0], *written[1]]), **values_of_rows(*row_digests(case, layout))}


MASKED = [case for case in PACKED_CASES if case.mask and not case.has_ties]


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_boundary_files_give_the_rows_that_eos_tokens_give(tmp_path, case):
    written = write_case(case, tmp_path)
    write_boundaries(case, written[0])
    corpus, options = open_case(case, tmp_path, written), packing_of(case) | {"bos_token_id": None}
    layout = PackedLayout(corpus, case.sequence_length, cache_dir=tmp_path / "cache", **options)
    found = values_of_rows(*row_digests(case, layout))
    assert found == {key: SOME[case.name][key] for key in found}


@pytest.mark.parametrize("ties", ["stable", "numpy"])
@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda case: case.name)
def test_rows_are_olmo_cores_except_for_ties_between_documents_of_equal_length(tmp_path, case, ties):
    found, expected = values_of(case, tmp_path / "corpus", ties), SOME[case.name]
    assert found["corpus"] == expected["corpus"], "numpy draws another corpus than for the recorded values"
    assert found["lengths"] == expected["lengths"]
    assert case.has_ties or found == expected


def playable() -> list[str]:
    """Return the names of `VARIANTS` that this CPU can imitate: its own, and those with fewer instructions."""
    return list(VARIANTS)[list(VARIANTS).index(numpy_sort()) :]


def run_variant(variant: str, code: str, *arguments: str) -> str:
    """Return the last line that `code` prints in a process whose numpy sorts like `variant`."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {"NPY_DISABLE_CPU_FEATURES": VARIANTS[variant], "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    done = run_python("-c", f"import test_packed_olmo as tests\n{code}", *arguments, **environment)
    return done.stdout.splitlines()[-1]


STABLE = """
import dataclasses, hashlib, sys
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.plan import depends_of, make_plan
digest = hashlib.sha256()
for number, case in enumerate(tests.PACKED_CASES[::3]):
    place = tests.Path(sys.argv[1]) / str(number)
    place.mkdir()
    layout = tests.layout_of(case, place, "stable", tests.write_case(case, place))
    for algorithm in ALGORITHMS:
        options = dataclasses.replace(layout.packing, algorithm=algorithm, epoch=1, seed=3)
        for array in make_plan(layout.finder, options).values():
            digest.update(array.tobytes())
    digest.update(repr(depends_of(layout.finder, options)).encode())
    digest.update(next((place / "cache" / "plans").glob("*.arrays")).read_bytes())
print(tests.numpy_sort(), digest.hexdigest())
"""


def test_stable_plans_are_the_same_bytes_whatever_instructions_numpy_may_use(tmp_path):
    found = {}
    for variant in {playable()[0], "baseline"}:
        (tmp_path / variant).mkdir()
        sort, found[variant] = run_variant(variant, STABLE, str(tmp_path / variant)).split()
        assert sort == variant
    assert len(set(found.values())) == 1


def test_an_invalid_plan_with_a_right_checksum_is_made_again(tmp_path):
    case, written = PACKED_CASES[0], write_case(PACKED_CASES[0], tmp_path)
    layout = layout_of(case, tmp_path, "stable", written)
    (path,) = (tmp_path / "cache" / "plans").glob("*.arrays")
    expected = [layout.spans(row) for row in range(len(layout))]
    whole, depends = artifact.open_file(path)
    arrays = {name: np.array(array) for name, array in whole.items()}
    arrays["ends"][3] = -7
    artifact.save(path, depends, arrays)
    again = layout_of(case, tmp_path, "stable", written)
    assert [again.spans(row) for row in range(len(again))] == expected
    assert artifact.open_file(path)[0]["ends"][3] == again.plans[0].ends[3]


@pytest.mark.parametrize("run", golden_values("olmo_packed_steps.json")["runs"], ids=lambda run: run["case"])
def test_a_trace_has_the_rows_that_olmo_core_gives_each_rank_in_two_epochs(tmp_path, run):
    case = next(case for case in PACKED_CASES if case.name == run["case"])
    written = write_case(case, tmp_path)
    assert digest_of_files([*written[0], *written[1]]) == run["corpus"], "the corpus is not that of the golden file"
    corpus, options = open_case(case, tmp_path, written), packing_of(case)
    layout = PackedLayout(corpus, case.sequence_length, cache_dir=tmp_path, **options)
    assert "".join(row_digests(case, layout)[0]) == run["rows"]
    pipeline = pipeline_of(layout, global_batch_size=run["batch"], seed=run["seed"], epochs=run["epochs"])
    steps = range(len(pipeline))
    assert len(steps) == len(run["steps"])
    for rank in range(run["ranks"]):
        found = trace(pipeline, steps, host=Host(rank, run["ranks"]))
        rows = np.unique(np.stack([found.step, found.row, found.instance]), axis=1)[2]
        assert rows.reshape(len(steps), -1).tolist() == [ranks[rank] for ranks in run["steps"]]


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
@pytest.mark.parametrize("variant", sorts.SORTS)
def test_every_row_is_the_row_that_olmo_core_makes_on_the_named_cpu(tmp_path, variant, case):
    golden = golden_of(variant, case)
    # If this process sorts like `variant`, plain "numpy" has the same rows.
    for ties in (f"numpy:{variant}", *["numpy"] * (variant == numpy_sort())):
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
    for ties in ("stable", "numpy", f"numpy:{numpy_sort()}"):
        assert argsorts(ties, [LENGTHS, LENGTHS]) == [None, None]


@needs_avx2
def test_one_process_sorts_all_groups(tmp_path, calls_of):
    started = calls_of(subprocess, "run")
    case = PLAN_CASE._replace(group=1)
    layout = layout_of(case, tmp_path, "numpy:baseline", write_case(case, tmp_path))
    assert len(layout) and len(layout.corpus.shards) == 5
    assert len(started) == 1


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
    expected |= {"stable": None, "numpy": {"version": np.__version__, "sort": numpy_sort()}}
    for ties, sort in expected.items():
        layout = layout_of(PLAN_CASE, tmp_path, ties, written)
        assert depends_of(layout.finder, layout.packing)["numpy"] == sort
        assert (f"numpy='{np.__version__} " in repr(layout)) == (ties != "stable")
        np.testing.assert_array_equal(make_plan(layout.finder, layout.packing)["start"], layout.plans[0].start)
    assert len(list((tmp_path / "cache").rglob("*.arrays"))) == len(expected)
    layout = layout_of(PLAN_CASE, tmp_path, "numpy", written)
    monkeypatch.setattr(sorts, "numpy_sort", lambda: "another")
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
    monkeypatch.setattr(sorts, "_dispatched", dispatched)
    assert [sorts.disabled_for(sort) for sort in sorts.SORTS] == ["", avx2, baseline]
