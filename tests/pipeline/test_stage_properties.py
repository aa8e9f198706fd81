"""Random runs of stages with random amendments, against a reference that deletes steps from a list and tokens from arrays."""

import copy
import random

import numpy as np
import pytest
from batches import assert_same, load, take
from pair_files import make_pairs, write_pairs
from sft_files import documents, write_olmo
from test_amendment_properties import two_corpora, without

from grain_sft import GrainSftError, Host
from grain_sft.layout import documents_named_in
from grain_sft.provenance import check_audit, difference, trace

LAYOUTS = [
    {"kind": "windows", "max_target_sequence_length": 64},
    {"kind": "padded"},
    {"kind": "packed"},
    {"kind": "packed", "long_documents": "fragment"},
]
FEW, MANY = (0, 3, 11, 16, 19, 27), range(30, 230)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    vsl = {"path": str(write_olmo(folder / "vsl", documents(400, 9, longest=60))), "eos_token_id": 2, "dtype": "uint16"}
    pairs = {"path": str(write_pairs(folder / "pairs", make_pairs(90, 4)))}
    return {"texts": two_corpora(folder), "vsl": vsl, "pairs": pairs}


def stage_of(drawn, corpora, hosts, order, kind):
    """Return a random stage: of pairs, of rows of several lengths, of a mixture or of one corpus."""
    sampler = {"global_batch_size": hosts * drawn.randint(1, 2), "order": order}
    length = {"sequence_length": drawn.choice([16, 32, 64])}
    if kind == "pairs":
        layout = {**length, "kind": "pairs", "prompt_length": 8}
        return {"corpus": corpora["pairs"], "layout": layout, "sampler": sampler}
    if drawn.random() < 0.2:
        layout = {"kind": "olmo_vsl", "sequence_length": 32, "min_sequence_length": 8}
        return {"corpus": corpora["vsl"], "layout": layout, "sampler": {"global_batch_size": hosts}}
    own = {"corpus": drawn.choice(corpora["texts"]), "layout": {**length, **drawn.choice(LAYOUTS)}, "sampler": sampler}
    schedule = [{"step": drawn.randint(1, 3), "global_batch_size": 2 * hosts}] if drawn.random() < 0.3 else []
    if drawn.random() < 0.4:
        names = drawn.choice(["ab", "cd"])
        sources = zip(names, corpora["texts"], strict=True)
        mixture = {name: {"weight": drawn.randint(1, 3), **each} for name, each in sources}
        mixture[names[1]]["layout"] = drawn.choice([{}, {"kind": "padded"}])
        own["corpus"] = {"mixture": mixture}
        if own["layout"]["kind"] == "windows":
            own["layout"] = {**length, "kind": "packed"}
        if drawn.random() < 0.5:
            schedule.append({"step": 4, "weights": {names[0]: drawn.randint(4, 7)}})
    if schedule:
        sampler["schedule"] = schedule
    if drawn.random() < 0.3:
        own["transforms"] = drawn.choice([["shift_targets"], ["ngram_filter", "shift_targets"]])
    return own


def case_of(corpora, seed):
    """Return a random config of stages, amendments, and a number of hosts."""
    drawn = random.Random(seed)
    hosts, order = drawn.randint(1, 8), drawn.choice(["shuffle", "olmo", "sequential"])
    kind = "pairs" if drawn.random() < 0.1 else "texts"
    stages = []
    for _ in range(drawn.randint(1, 4)):
        stages.append({"steps": drawn.randint(1, 6), **stage_of(drawn, corpora, hosts, order, kind)})
    if drawn.random() < 0.5:
        del stages[-1]["steps"]
    amendments = []
    for _ in range(drawn.randint(0, 4)):
        step, chosen = drawn.randrange(14), drawn.random()
        mixed = ["".join(each["corpus"]["mixture"]) for each in stages if "mixture" in each["corpus"]]
        if chosen < 0.4:
            amendments.append({"skip": {"from": step, "steps": drawn.randint(1, 5)}})
        elif chosen < 0.7 and mixed:
            weights = {drawn.choice(drawn.choice(mixed)): drawn.randint(0, 4) + 0.5}
            amendments.append({"reweight": {"from": step, "weights": weights}})
        else:
            amendments.append({"withdraw": {"from": step, "documents": drawn.sample(range(40), drawn.randint(1, 25))}})
    return {"sampler": {"seed": drawn.randrange(5)}, "stages": stages}, amendments, hosts


def sections_of(amendments, kind):
    """Return the amendments of a kind, in the order of their steps."""
    return sorted((entry[kind] for entry in amendments if kind in entry), key=lambda each: each["from"])


def with_weights(config, bounds, reweights):
    """Return the config with the weights of `reweights`, pairs of a data step and weights, in the mixtures and schedules of its
    stages; and whether a stage took each."""
    stages, taken = copy.deepcopy(config["stages"]), []
    for data_step, changed in reweights:
        taken.append(False)
        for stage, (begin, end) in zip(stages, bounds, strict=True):
            mixture = stage["corpus"].get("mixture", {})
            if not changed.keys() <= mixture.keys() or data_step >= end:
                continue
            taken[-1] = True
            entries = {each["step"]: each for each in stage["sampler"].get("schedule", [])}
            step, now = data_step - begin, {name: each["weight"] for name, each in mixture.items()}
            if step <= 0:
                for name in changed:
                    mixture[name]["weight"] = changed[name]
                continue
            for at in sorted(at for at in entries if at <= step):
                now |= entries[at].get("weights", {})
            entries.setdefault(step, {"step": step})["weights"] = now | changed
            stage["sampler"]["schedule"] = [entries[at] for at in sorted(entries)]
    return {**config, "stages": stages}, all(taken)


def without_pairs(source, rows, gone):
    """Return `rows` of pairs with all tokens of the pairs `gone` as padding."""
    element = {key: array.copy() for key, array in source.read(rows).items()}
    pieces = source.layout.pieces(rows)
    for row, column, length, document in zip(
        *(each.tolist() for each in (pieces.row, pieces.column, pieces.length, pieces.document)), strict=True
    ):
        if document in gone:
            for key, array in element.items():
                array[row, column : column + length] = source.layout.corpus.padding_token_id if key == "tokens" else 0
    return element


def check_case(corpora, folder, seed):
    config, amendments, hosts = case_of(corpora, seed)
    plain, amended = load(config), {**config, "amendments": amendments}
    end, (skips, withdrawn) = min(plain.end_step, 24), (sections_of(amendments, kind) for kind in ("skip", "withdraw"))
    data_steps = list(range(100))
    for each in skips:
        del data_steps[each["from"] : each["from"] + each["steps"]]
    left = [step for step in data_steps if step < end]
    bounds = [(stage.first_step, stage.end_step) for stage in plain.stages]
    reweights = [(data_steps[each["from"]], each["weights"]) for each in sections_of(amendments, "reweight")]
    weighted, taken = with_weights(config, bounds, reweights)
    if not taken or not left:
        with pytest.raises(GrainSftError, match="skip: all" if taken else "no stage from that step on is a mixture"):
            load(amended)
        return
    changed, reweighted = load(amended), load(weighted)
    if plain.end_step == end:
        assert changed.end_step == len(left)
    layouts = [stage.source.layout for stage in plain.stages]
    numbers = [documents_named_in(layouts, each["documents"]) for each in withdrawn]
    for step, data_step in enumerate(left):
        at = next(at for at, stage in enumerate(reweighted.stages) if data_step < stage.end_step)
        stage = reweighted.stages[at]
        gone = {int(n) for each, own in zip(withdrawn, numbers, strict=True) if each["from"] <= step for n in own[at]}
        pairs = stage.source.layout.of_pairs
        element = (without_pairs if pairs else without)(stage.source, stage.sampler.rows(data_step), gone)
        for transform in stage.transforms:
            element = transform.map(element)
        assert_same(changed[step], element)
        lines = trace(changed, range(step, step + 1))
        seen = (lines.stop - lines.start - (0 if lines.withdrawn is None else lines.withdrawn)).sum()
        batch = changed[step]
        if pairs:
            continue
        assert seen == np.count_nonzero(batch["inputs_segmentation"])
        assert lines.trainable.sum() == np.count_nonzero(batch["targets_segmentation"])
    split = [load(amended, Host(host, hosts)) for host in range(hosts)]
    for step in range(len(left)):
        join = np.concatenate if changed.at(step).sampler.consecutive_slots else lambda parts: np.stack(parts, 1)
        for key, array in changed[step].items():
            parts = join([each[step][key] for each in split])
            np.testing.assert_array_equal(parts.reshape(array.shape), array)
    bounds = {each["from"] for each in skips + withdrawn} | {stage.first_step for stage in changed.stages}
    for bound in sorted(bounds | {0, len(left) - 1}):
        for step in (bound - 1, bound):
            if 0 < step < len(left):
                state = changed.iter(start_step=step, threads=0).get_state()
                again = load(amended).iter(threads=0)
                again.set_state(state)
                assert_same(next(again), changed[step])
    audited = load({**amended, "audit": str(folder / "audit")})
    take(audited, 0, len(left), threads=0)
    assert check_audit(folder / "audit.log", changed).findings == []
    unequal = []
    for step in range(len(left)):
        pairs = [(plain[step].get(key), array) for key, array in changed[step].items()]
        unequal += [] if all(np.array_equal(one, other) for one, other in pairs) else [step]
    ends = plain.end_step != changed.end_step
    found = difference(plain, changed, steps=range(len(left) + (1 if ends else 0)))
    assert found.first_step == (unequal[0] if unequal else len(left) if ends else None)


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in MANY)])
def test_random_stages_with_random_amendments(corpora, tmp_path, seed):
    check_case(corpora, tmp_path, seed)
