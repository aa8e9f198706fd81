"""Random runs with random amendments equal a reference, which deletes steps from a list and tokens from arrays."""

import hashlib
import json
import os
import pickle
import signal
import traceback

import numpy as np
import pytest
from batches import assert_same, load, take
from random_runs import as_run, case_of, sections_of, with_weights, without, without_pairs, write_corpora

from grain_sft import GrainSftError, Host
from grain_sft.layout import documents_named_in
from grain_sft.provenance import check_audit, difference, trace

STEPS = 16  # steps of a run that is killed
# Seeds of random cases: a few for each run of the tests, and many for the marker `heavy`.
FEW, MANY = (1, 2, 6, 9, 11, 12, 16, 17, 20, 21, 25, 29, 57, 166, 360), range(200, 500)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def check_case(corpora, folder, seed):
    """Compare a random amended run with the reference: batches, hosts, resumption, audit log and first difference."""
    config, amendments, hosts = case_of(corpora, seed)
    plain, amended = load(as_run(config)), as_run(config, amendments=amendments)
    # Step k of the amended run is step `data_steps[k]` of the plain run.
    skips, withdrawn, reweights = (sections_of(amendments, kind) for kind in ("skip", "withdraw", "reweight"))
    data_steps, end = list(range(100)), min(plain.end_step, 24)
    for each in skips:
        del data_steps[each["from"] : each["from"] + each["steps"]]
    left = [step for step in data_steps if step < end]
    bounds = [(stage.first_step, stage.end_step) for stage in plain.stages]
    weights = [(data_steps[each["from"]], each["weights"]) for each in reweights]
    # `weighted` is the config with the new weights in its stages. `apply` is False if some weights change no stage.
    weighted, apply = with_weights(config, bounds, weights)
    if not apply or not left:
        with pytest.raises(GrainSftError, match="skip: all" if apply else "no stage from that step on is a mixture"):
            load(amended)
        return
    changed = load(amended)
    if plain.end_step == end:
        assert changed.end_step == len(left)
    check_batches(changed, load(as_run(weighted)), left, withdrawn)
    # All hosts together have the global batch.
    split = [load(amended, Host(host, hosts)) for host in range(hosts)]
    for step in range(len(left)):
        # A host has consecutive slots, or every `hosts`-th slot.
        join = np.concatenate if changed.at(step).sampler.consecutive_slots else lambda parts: np.stack(parts, 1)
        for key, array in changed[step].items():
            parts = join([each[step][key] for each in split])
            np.testing.assert_array_equal(parts.reshape(array.shape), array)
    # Resume at each step at which something changes, and one step before.
    changes = {each["from"] for each in skips + withdrawn} | {stage.first_step for stage in changed.stages}
    for step in sorted(bound + before for bound in changes | {0, len(left) - 1} for before in (-1, 0)):
        if 0 < step < len(left):
            again = load(amended).iter(threads=0)
            again.set_state(changed.iter(start_step=step, threads=0).get_state())
            assert_same(next(again), changed[step])
    take(load({**amended, "audit": str(folder / "audit")}), 0, len(left), threads=0)
    checked, log = check_audit(folder / "audit.log", changed), (folder / "audit.log").read_text()
    assert checked.findings == [] and len(checked.epochs) == log.count("action=epoch_complete ")
    # `difference` finds the first step whose batches differ. A run that ends earlier differs there.
    ends = plain.end_step != changed.end_step
    unequal = [len(left)] if ends else []
    for step in range(len(left)):
        pairs = [(plain[step].get(key), array) for key, array in changed[step].items()]
        unequal += [] if all(np.array_equal(one, other) for one, other in pairs) else [step]
    assert difference(plain, changed, steps=range(len(left) + ends)).first_step == min(unequal, default=None)


def check_batches(changed, reweighted, left, withdrawn):
    """Check step k of `changed`, and its trace, against step `left[k]` of `reweighted` without withdrawn documents."""
    layouts = [stage.source.layout for stage in reweighted.stages]
    numbers = [documents_named_in(layouts, each["documents"]) for each in withdrawn]
    in_a_worker = pickle.loads(pickle.dumps(changed))
    for step, data_step in enumerate(left):
        at = next(at for at, stage in enumerate(reweighted.stages) if data_step < stage.end_step)
        stage = reweighted.stages[at]
        gone = {int(n) for each, own in zip(withdrawn, numbers, strict=True) if each["from"] <= step for n in own[at]}
        pairs = stage.source.layout.of_pairs
        expected = (without_pairs if pairs else without)(stage.source, stage.sampler.rows(data_step), gone)
        for transform in stage.transforms:
            expected = transform.map(expected)
        batch = (in_a_worker if step % 3 else changed)[step]
        assert_same(batch, expected)
        for array in batch.values():
            if array.flags.writeable:
                array.fill(7)  # a trainer may overwrite its batch; later batches must stay right
        if not pairs:
            lines = trace(changed, range(step, step + 1))
            seen = (lines.stop - lines.start - (0 if lines.withdrawn is None else lines.withdrawn)).sum()
            assert seen == np.count_nonzero(expected["inputs_segmentation"])
            assert lines.trainable.sum() == np.count_nonzero(expected["targets_segmentation"])


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in MANY if seed not in FEW)])
def test_a_random_amended_run_equals_the_reference(corpora, tmp_path, monkeypatch, seed):
    if seed % 2:  # rows are read segment by segment
        monkeypatch.setattr("grain_sft.corpus.row_format.LONG_SEGMENT", 0)
    check_case(corpora, tmp_path, seed)


def run_until_killed(config, folder, die):
    """Run a config in a child process that logs the hash of each batch and then saves its state. Return whether it died.

    `die` is the number of the batch at which the child kills itself, and whether it does so before it saves the state.
    """
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        return status == signal.SIGKILL
    try:
        batches, state, log = load(config).iter(threads=0), folder / "state", folder / "log"
        if state.exists():
            batches.set_state(json.loads(state.read_text()))
        for number, batch in enumerate(batches):
            step = batches.next_step - 1
            with log.open("a") as file:
                file.write(f"{step} {hash_of(batch)}\n")
            if die == (number, True):
                os.kill(os.getpid(), signal.SIGKILL)
            (folder / "new").write_text(json.dumps(batches.get_state()))
            os.replace(folder / "new", state)
            if die == (number, False):
                os.kill(os.getpid(), signal.SIGKILL)
            if step == STEPS - 1:
                break
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def hash_of(batch):
    return hashlib.sha256(b"".join(batch[key].tobytes() for key in sorted(batch))).hexdigest()


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(4, 24))])
def test_a_run_that_is_killed_around_every_amendment_has_the_batches_of_a_run_without_kills(corpora, tmp_path, seed):
    """Amendments are added between kills. Each logged batch equals that of a run with all amendments from the start."""
    config, amendments, _ = case_of(corpora, seed, most=1)
    config["stages"][0]["sampler"].pop("epochs", None)
    config = as_run(config, audit=str(tmp_path / "audit"))
    amendments.sort(key=lambda entry: next(iter(entry.values()))["from"])
    boundaries = {max(0, each["from"] + more) for entry in amendments for each in entry.values() for more in (-1, 0)}
    boundaries.add(5)  # a kill also where no amendment begins before the end
    done, kills = 0, 0
    while done < STEPS:
        known = [entry for entry in amendments if next(iter(entry.values()))["from"] <= done + 1]  # made by now
        at = min((step for step in boundaries if step >= done), default=STEPS)
        boundaries.discard(at)
        before_saving = (seed + at) % 2 == 0
        if not run_until_killed({**config, "amendments": known}, tmp_path, (at - done, before_saving)):
            break
        kills += 1
        done = at if before_saving else at + 1
    whole = load({**config, "amendments": amendments})
    expected = {step: hash_of(whole[step]) for step in range(STEPS)}
    for ending in ("log", "jsonl"):
        assert check_audit(tmp_path / f"audit.{ending}", whole).findings == []
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert kills and all(expected[int(step)] == found for step, found in lines)
    assert {int(step) for step, _ in lines} == set(range(STEPS))
