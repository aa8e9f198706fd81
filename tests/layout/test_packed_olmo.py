"""Best-fit decreasing packs the rows of OLMo-core's NumpyPackedFSLDataset, which make_packed_golden.py recorded."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from batches import golden_values, pipeline_of
from packed_corpora import PACKED_CASES, VARIANTS, PackedCase, digest_of_files, values_of_rows, write_case
from packed_layouts import open_case, packing_of, row_digests, write_boundaries
from python_runs import run_python

from grain_sft import Host, PackedLayout
from grain_sft.layout.packing.numpy_sort import numpy_sort
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
