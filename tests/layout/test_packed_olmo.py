"""Best-fit decreasing against the rows of OLMo-core's NumpyPackedFSLDataset (tests/golden/make_packed_golden.py)."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from packed_corpora import (
    BOS,
    EOS,
    PACKED_CASES,
    PAD,
    ROW_DIGITS,
    VARIANTS,
    PackedCase,
    digest_of_files,
    olmo_doc_lengths,
    row_digest,
    write_case,
)

from grain_sft import NpyDataSource, PackedLayout, open_corpus
from grain_sft.layout.plan import depends_of, numpy_sort
from grain_sft.storage import artifact

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "packed_rows.json").read_text())["variants"]
SOME = next(iter(GOLDEN.values()))  # of any variant: what ties don't change is the same in all


def layout_of(case: PackedCase, folder: Path, ties: str, written: tuple[list[Path], list[Path]]) -> PackedLayout:
    tokens, masks = written
    where = folder if masks else list(map(str, tokens))
    corpus = dataclasses.replace(open_corpus(where, dtype=case.dtype, eos_token_id=EOS), pad_token_id=PAD)
    return PackedLayout(
        corpus,
        case.sequence_length,
        long_documents=case.long,
        source_group_size=case.group,
        ties=ties,
        boundaries="eos",
        bos_token_id=BOS if case.bos else None,
        cache_dir=folder / "cache",
    )


def rows_of(case: PackedCase, layout: PackedLayout) -> tuple[list[str], list[list[list[int]]]]:
    """The digest of every row as the golden file has it, and its places (file, start, stop)."""
    read = NpyDataSource(layout).read(range(len(layout)))
    digests, places = [], []
    for row in range(len(layout)):
        places.append([[span.shard, span.start, span.stop] for span in layout.spans(row)])
        lengths = olmo_doc_lengths(read["segment_ids"][row], read["tokens"][row], case.bos)
        digests.append(row_digest(read["tokens"][row], read["loss_mask"][row], lengths, places[-1]))
    return digests, places


def check(case: PackedCase, folder: Path, ties: str, golden: dict) -> None:
    """All that the golden values of one variant say of a case."""
    written = write_case(case, folder)
    assert digest_of_files([*written[0], *written[1]]) == golden["corpus"], "numpy draws other corpora than it did"
    digests, places = rows_of(case, layout_of(case, folder, ties, written))
    for row, expected in golden["shown"].items():
        assert places[int(row)] == expected
    rows = [golden["rows"][at : at + ROW_DIGITS] for at in range(0, len(golden["rows"]), ROW_DIGITS)]
    assert [digest[:ROW_DIGITS] for digest in digests] == rows, case.name
    assert hashlib.sha256("".join(digests).encode()).hexdigest()[:16] == golden["all"]


def check_variant(key: str, folder: Path) -> int:
    """Every case with `ties="numpy"`, against the golden values of the variant that runs here."""
    for number, case in enumerate(PACKED_CASES):
        place = folder / str(number)
        place.mkdir(parents=True)
        check(case, place, "numpy", GOLDEN[key][case.name])
    return len(PACKED_CASES)


def test_the_golden_values_are_of_enough_corpora_and_tell_variants_apart():
    assert all(set(found) == {case.name for case in PACKED_CASES} for found in GOLDEN.values())
    assert len(PACKED_CASES) >= 20
    for case in PACKED_CASES:
        orders = {found[case.name]["all"] for found in GOLDEN.values()}
        assert len(orders) == 1 or case.has_ties
        assert len({found[case.name]["lengths"] for found in GOLDEN.values()}) == 1
    of_each = [GOLDEN.get(f"numpy {np.__version__}, {variant}") for variant in VARIANTS]
    for one, other in itertools.combinations(filter(None, of_each), 2):
        assert sum(one[case.name]["all"] != other[case.name]["all"] for case in PACKED_CASES) >= 10


@pytest.mark.parametrize("ties", ["stable", "numpy"])
@pytest.mark.parametrize("case", [case for case in PACKED_CASES if not case.has_ties], ids=lambda case: case.name)
def test_rows_of_distinct_lengths_are_olmo_cores_whatever_sorts_them(tmp_path, case, ties):
    check(case, tmp_path, ties, SOME[case.name])


@pytest.mark.parametrize("ties", ["stable", "numpy"])
@pytest.mark.parametrize("case", PACKED_CASES, ids=lambda case: case.name)
def test_every_row_holds_documents_of_the_lengths_that_olmo_core_puts_there(tmp_path, case, ties):
    layout = layout_of(case, tmp_path, ties, write_case(case, tmp_path))
    lengths: list[int] = []
    for row in range(len(layout)):
        spans = layout.spans(row)
        lengths += [len(spans), *(span.stop - span.start for span in spans)]
    assert row_digest([], [], [], lengths) == SOME[case.name]["lengths"]


def playable() -> list[str]:
    """The variants that this CPU can play."""
    return list(VARIANTS)[list(VARIANTS).index(numpy_sort()) :]


def run_variant(variant: str, code: str, *arguments: str) -> str:
    """What `code` prints in a process whose numpy sorts like `variant`."""
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": VARIANTS[variant], "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


ALL_CASES = """
import sys
from pathlib import Path
import numpy as np
import test_packed_olmo as tests
from grain_sft.layout.plan import depends_of, numpy_sort
from grain_sft.storage import artifact
key = f"numpy {np.__version__}, {numpy_sort()}"
print(key, tests.check_variant(key, Path(sys.argv[1])) if key in tests.GOLDEN else "no golden values")
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_row_is_olmo_cores_under_each_of_numpys_sorts(tmp_path, variant):
    """Tokens, label mask, lengths of documents and their places, with `ties="numpy"`."""
    if variant not in playable():
        pytest.skip(f"this CPU has no {variant}")
    printed = run_variant(variant, ALL_CASES, str(tmp_path))
    if printed.endswith("no golden values"):
        pytest.skip(printed)
    assert printed == f"numpy {np.__version__}, {variant} {len(PACKED_CASES)}"


STABLE = """
import hashlib, sys
from pathlib import Path
import test_packed_olmo as tests
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.plan import depends_of, make_plan, numpy_sort
digest, plans = hashlib.sha256(), []
for number, case in enumerate(tests.PACKED_CASES):
    place = Path(sys.argv[1]) / str(number)
    place.mkdir()
    layout = tests.layout_of(case, place, "stable", tests.write_case(case, place))
    for algorithm in ALGORITHMS:
        recipe = tests.dataclasses.replace(layout.packing, algorithm=algorithm, epoch=1, seed=3)
        for array in make_plan(layout.corpus, recipe).values():
            digest.update(array.tobytes())
    digest.update(repr(depends_of(layout.corpus, recipe)).encode())
    digest.update(next((place / "cache" / "plans").glob("*.arrays")).read_bytes())
print(numpy_sort(), digest.hexdigest())
"""


def test_stable_plans_are_the_same_bytes_whatever_instructions_numpy_may_use(tmp_path):
    digests, sorts = set(), []
    for variant in playable():
        (tmp_path / variant).mkdir()
        sort, digest = run_variant(variant, STABLE, str(tmp_path / variant)).split()
        digests.add(digest)
        sorts.append(sort)
    assert sorts == playable()
    assert len(digests) == 1


def test_a_plan_with_numpys_ties_is_kept_apart_for_every_sort_and_version(tmp_path, monkeypatch):
    case = PACKED_CASES[0]
    layout = layout_of(case, tmp_path, "numpy", write_case(case, tmp_path))
    depends = depends_of(layout.corpus, layout.packing)
    assert depends["numpy"] == {"version": np.__version__, "sort": numpy_sort()}
    stable = dataclasses.replace(layout.packing, ties="stable")
    assert depends_of(layout.corpus, stable)["numpy"] is None
    monkeypatch.setattr("grain_sft.layout.plan.numpy_sort", lambda: "another")
    assert depends_of(layout.corpus, layout.packing) != depends


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays["start"].__setitem__(3, 1 << 62),
        lambda arrays: arrays["ends"].__setitem__(3, -7),
        lambda arrays: arrays.update(length=arrays["length"].reshape(1, -1)),
        lambda arrays: arrays.pop("document"),
    ],
)
def test_a_plan_that_was_edited_under_a_right_checksum_is_made_again(tmp_path, change):
    case = PACKED_CASES[0]
    layout = layout_of(case, tmp_path, "stable", write_case(case, tmp_path))
    (path,) = (tmp_path / "cache" / "plans").glob("*.arrays")
    expected = [layout.spans(row) for row in range(len(layout))]
    whole, depends = artifact.open_file(path)
    arrays = {name: np.array(array) for name, array in whole.items()}
    change(arrays)
    artifact.save(path, depends, arrays)
    again = PackedLayout(layout.corpus, case.sequence_length, cache_dir=tmp_path / "cache")
    assert [again.spans(row) for row in range(len(again))] == expected
