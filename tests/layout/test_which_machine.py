"""Which ties made a plan: plans of ours and OLMo-core's, beside all that this machine can make."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from packed_corpora import BOS, EOS, PACKED_CASES, PLAN_CASE, write_case
from test_packed_olmo import layout_of, playable

from grain_sft import PackedLayout, open_corpus
from grain_sft.errors import LayoutError, StorageError
from grain_sft.layout.plan import make_plan
from grain_sft.replay.which_machine import VARIANTS, first_difference, read_made_plan, which_machine
from grain_sft.storage import artifact as artefact

CASE = next(case for case in PACKED_CASES if case.name == "log-normal, many")
GOLDEN_PLAN = Path(__file__).parents[1] / "golden" / "olmo_plan"


def plan_file(folder: Path) -> Path:
    (found,) = (folder / "cache" / "plans").glob("*.arrays")
    return found


def rows(arrays) -> list[list[tuple]]:
    pieces = list(zip(arrays["start"].tolist(), arrays["length"].tolist(), strict=True))
    ends = arrays["ends"].tolist()
    return [pieces[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("ties", ["stable", "numpy", *VARIANTS[2:]])
def test_a_plan_of_ours_is_equal_to_its_own_variant_and_the_first_row_that_differs_is_told(tmp_path, ties):
    if ties.startswith("numpy:") and ties.partition(":")[2] not in playable():
        pytest.skip(f"this CPU has no {ties}")
    layout = layout_of(CASE, tmp_path, ties, write_case(CASE, tmp_path))
    plan = read_made_plan(plan_file(tmp_path), layout.corpus, CASE.sequence_length)
    assert plan.says.startswith(f"ties='{ties}'") and (f"numpy {np.__version__}, " in plan.says) == (ties != "stable")
    matches = {match.ties: match for match in which_machine(plan, layout.corpus)}
    assert tuple(matches) == VARIANTS
    own = f"numpy:{playable()[0]}" if ties == "numpy" else ties
    assert [match.ties for match in matches.values() if match.equal] == [own]
    for other, match in matches.items():
        if match.equal is False:
            made = rows(make_plan(layout.corpus, dataclasses.replace(layout.recipe, ties=other)))
            mine = rows(vars(layout.plans[0]))
            assert mine[: match.row] == made[: match.row] and mine[match.row] != made[match.row]
            segment = next(
                at for at, (a, b) in enumerate(zip(mine[match.row], made[match.row], strict=False)) if a != b
            )
            start, length = mine[match.row][segment]
            assert (
                f"row {match.row:,} is the first that differs: as segment {segment + 1} the plan holds" in match.message
            )
            assert f"tokens {start:,} to {start + length:,}, this tokens" in match.message
        elif match.equal is None:
            assert match.ties.partition(":")[2] not in playable() and "this CPU has no" in match.message


def test_without_equal_lengths_all_variants_are_equal(tmp_path):
    case = next(case for case in PACKED_CASES if case.name == "distinct")
    layout = layout_of(case, tmp_path, "stable", write_case(case, tmp_path))
    plan = read_made_plan(plan_file(tmp_path), layout.corpus, case.sequence_length)
    found = [match.equal for match in which_machine(plan, layout.corpus)]
    assert found.count(True) == 1 + len(playable()) and False not in found


def test_a_plan_that_olmo_core_left_in_its_work_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "made").mkdir()
    tokens, _ = write_case(PLAN_CASE, tmp_path / "made")
    corpus = open_corpus([str(path) for path in tokens], dtype=PLAN_CASE.dtype, eos_token_id=EOS)
    options = {"source_group_size": PLAN_CASE.group, "paths": [path.name for path in tokens]}
    plan = read_made_plan(GOLDEN_PLAN, corpus, PLAN_CASE.sequence_length, **options)
    equal = [match.ties for match in which_machine(plan, corpus) if match.equal]
    # OLMo-core made it under AVX2; under AVX-512 it makes the same one of these files (packed_rows.json has both).
    assert equal == [f"numpy:{sort}" for sort in playable() if sort != "baseline"]
    assert plan.says == ""
    again = read_made_plan(plan_file(tmp_path), corpus, PLAN_CASE.sequence_length)  # as it is kept in our cache
    assert again.says == "read from OLMo-core's work directory"
    assert [match.ties for match in which_machine(again, corpus) if match.equal] == equal


def test_a_plan_with_one_row_changed_is_of_no_machine(tmp_path):
    layout = layout_of(CASE, tmp_path, "stable", write_case(CASE, tmp_path))
    plan = read_made_plan(plan_file(tmp_path), layout.corpus, CASE.sequence_length)
    start = np.array(plan.arrays["start"])
    at = int(plan.arrays["ends"][4])
    start[at] += 1
    matches = which_machine(dataclasses.replace(plan, arrays={**plan.arrays, "start": start}), layout.corpus)
    assert not any(match.equal for match in matches)
    assert next(match.row for match in matches if match.ties == "stable") == 5


def test_the_first_row_that_differs_is_found_in_any_of_a_plans_columns():
    def plan(*packed):
        pieces = [piece for row in packed for piece in row]
        columns = np.array(pieces, np.int64).reshape(-1, 2).T
        return {"start": columns[0], "length": columns[1], "ends": np.cumsum([len(row) for row in packed])}

    base = plan([(0, 5), (9, 2)], [(5, 4)], [(11, 7)])
    assert first_difference(base, base) is None
    assert first_difference(base, plan([(0, 5), (9, 2)], [(5, 4)], [(11, 6)])) == 2
    assert first_difference(base, plan([(0, 5), (9, 2)], [(6, 4)], [(11, 7)])) == 1
    assert first_difference(base, plan([(0, 5)], [(9, 2), (5, 4)], [(11, 7)])) == 0
    assert first_difference(base, plan([(0, 5), (9, 2)], [(5, 4), (11, 7)])) == 1
    assert first_difference(base, plan([(0, 5), (9, 2)], [(5, 4)])) == 2
    assert first_difference(plan([(0, 5), (9, 2)], [(5, 4)]), base) == 2


def test_a_plan_of_something_else_is_a_sentence(tmp_path):
    layout = layout_of(CASE, tmp_path, "stable", write_case(CASE, tmp_path))
    path, length = plan_file(tmp_path), CASE.sequence_length
    with pytest.raises(LayoutError, match="has rows of 1024 tokens; expected 512"):
        read_made_plan(path, layout.corpus, 512)
    (tmp_path / "other").mkdir()
    tokens, _ = write_case(dataclasses.replace(CASE, seed=99), tmp_path / "other")
    other = open_corpus([str(path) for path in tokens], dtype=CASE.dtype, eos_token_id=EOS)
    with pytest.raises(LayoutError, match=r"a plan of the documents content-sha256:.*expected content-sha256:"):
        read_made_plan(path, other, length)
    with pytest.raises(StorageError, match="can't be opened"):
        read_made_plan(tmp_path / "none", layout.corpus, length)
    with pytest.raises(LayoutError, match="dataset-common"):
        read_made_plan(tmp_path, layout.corpus, length)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(StorageError, match="damaged"):
        read_made_plan(path, layout.corpus, length)
    shutil.rmtree(tmp_path / "cache")
    artefact.save(tmp_path / "else.arrays", {"what": 1}, {"a": np.arange(3)})
    with pytest.raises(LayoutError, match="holds no plan"):
        read_made_plan(tmp_path / "else.arrays", layout.corpus, length)


def test_its_own_options_are_taken_from_a_plan_of_ours(tmp_path):
    case = next(case for case in PACKED_CASES if case.name == "BOS, fragments")
    written = write_case(case, tmp_path)
    corpus = open_corpus([str(path) for path in written[0]], dtype=case.dtype, eos_token_id=EOS)
    for algorithm in ("first_fit_decreasing", "multipack"):
        cache = tmp_path / algorithm / "cache"
        PackedLayout(
            corpus,
            case.sequence_length,
            algorithm=algorithm,
            long_documents="fragment",
            bos_token_id=BOS,
            seed=3,
            batch_rows=4,
            cache_dir=cache,
        )
        plan = read_made_plan(plan_file(tmp_path / algorithm), corpus, case.sequence_length)
        assert plan.recipe.algorithm == algorithm and plan.recipe.bos_token_id == BOS
        assert which_machine(plan, corpus)[0].equal


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("depends", lambda depends: depends.update(numpy=1.5)),
        ("depends", lambda depends: depends.update(numpy={"version": "2"})),
        ("depends", lambda depends: depends["recipe"].update(sequence_length="long")),
        ("depends", lambda depends: depends["recipe"].update(more=1)),
        ("depends", lambda depends: depends["recipe"].pop("sequence_length")),
        ("arrays", lambda arrays: arrays["start"].__setitem__(3, 1 << 62)),
        ("arrays", lambda arrays: arrays["ends"].__setitem__(3, -7)),
        ("arrays", lambda arrays: arrays.update(length=arrays["length"].reshape(1, -1))),
        ("arrays", lambda arrays: arrays.pop("document")),
    ],
)
def test_a_plan_that_was_edited_under_a_right_checksum_is_a_sentence_and_made_again(tmp_path, part, change):
    layout = layout_of(CASE, tmp_path, "stable", write_case(CASE, tmp_path))
    path, length = plan_file(tmp_path), CASE.sequence_length
    expected = [layout.spans(row) for row in range(len(layout))]
    whole, depends = artefact.open_file(path)
    arrays = {name: np.array(array) for name, array in whole.items()}
    change(depends if part == "depends" else arrays)
    artefact.save(path, depends, arrays)
    with pytest.raises(LayoutError, match=r"damaged \(.*\)\. Delete it"):
        read_made_plan(path, layout.corpus, length)
    again = PackedLayout(layout.corpus, length, cache_dir=path.parent.parent)
    assert [again.spans(row) for row in range(len(again))] == expected
