"""Random runs of stages with random amendments, against a reference that deletes steps from a list and tokens from arrays."""

import random

import numpy as np
import pytest
from batches import assert_same, load
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
FEW, MANY = range(5), range(5, 205)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return two_corpora(tmp_path_factory.mktemp("staged"))


def case_of(corpora, seed):
    """Return a random config of stages, amendments, and a number of hosts."""
    drawn = random.Random(seed)
    hosts = drawn.randint(1, 8)

    def stage():
        own = {
            "corpus": drawn.choice(corpora),
            "layout": {"sequence_length": drawn.choice([16, 32, 64]), **drawn.choice(LAYOUTS)},
        }
        if drawn.random() < 0.35:
            own["corpus"] = {
                "mixture": {
                    name: {"weight": drawn.randint(1, 3), **each, "layout": drawn.choice([{}, {"kind": "padded"}])}
                    for name, each in zip(drawn.choice(["ab", "cd"]), corpora, strict=True)
                }
            }
            if own["layout"].get("kind") == "windows":
                own["layout"] = {"sequence_length": own["layout"]["sequence_length"], "kind": "packed"}
        own["sampler"] = {"global_batch_size": hosts * drawn.randint(1, 2)}
        if drawn.random() < 0.3:
            own["transforms"] = drawn.choice([["shift_targets"], ["ngram_filter", "shift_targets"]])
        return own

    first, stages = stage(), []
    for _ in range(drawn.randint(1, 4)):
        stages.append({"steps": drawn.randint(1, 6), **stage()})
    if drawn.random() < 0.5:
        del stages[-1]["steps"]
    order = drawn.choice(["shuffle", "olmo", "sequential"])
    config = {**first, "stages": stages}
    config["sampler"] = {**first["sampler"], "seed": drawn.randrange(5), "order": order}
    if drawn.random() < 0.3 and not any("mixture" in each["corpus"] for each in [first, *stages]):
        config["sampler"]["last_batch"] = "run_on"
    amendments = []
    for _ in range(drawn.randint(0, 4)):
        step = drawn.randrange(14)
        if drawn.random() < 0.5:
            amendments.append({"skip": {"from": step, "steps": drawn.randint(1, 5)}})
        else:
            amendments.append({"withdraw": {"from": step, "documents": drawn.sample(range(40), drawn.randint(1, 25))}})
    return config, amendments, hosts


def check_case(corpora, folder, seed):
    config, amendments, hosts = case_of(corpora, seed)
    plain = load(config)
    end = min(plain.end_step, 24)
    left, skips = list(range(end)), []
    for each in [entry["skip"] for entry in amendments if "skip" in entry]:
        skips.append(each)
    for each in sorted(skips, key=lambda each: each["from"]):
        del left[each["from"] : each["from"] + each["steps"]]
    if not left:
        with pytest.raises(GrainSftError, match="skip"):
            load({**config, "amendments": amendments})
        return
    amended = {**config, "amendments": amendments}
    changed = load(amended)
    if plain.end_step == end:
        assert changed.end_step == len(left)
    withdrawn = [entry["withdraw"] for entry in amendments if "withdraw" in entry]
    layouts = [stage.source.layout for stage in plain.stages]
    numbers = [documents_named_in(layouts, each["documents"]) for each in withdrawn]
    for step, data_step in enumerate(left):
        at = next(at for at, stage in enumerate(plain.stages) if data_step < stage.end_step)
        stage = plain.stages[at]
        gone = {int(n) for each, own in zip(withdrawn, numbers, strict=True) if each["from"] <= step for n in own[at]}
        element = without(stage.source, stage.sampler.rows(data_step), gone)
        for transform in stage.transforms:
            element = transform.map(element)
        assert_same(changed[step], element)
        lines = trace(changed, range(step, step + 1))
        seen = (lines.stop - lines.start - (0 if lines.withdrawn is None else lines.withdrawn)).sum()
        batch = changed[step]
        assert seen == np.count_nonzero(batch["inputs_segmentation"])
        assert lines.trainable.sum() == np.count_nonzero(batch["targets_segmentation"])
    split = [load(amended, Host(host, hosts)) for host in range(hosts)]
    for step in range(len(left)):
        for key, array in changed[step].items():
            parts = [each[step][key] for each in split]
            np.testing.assert_array_equal(np.stack(parts, 1).reshape(array.shape), array)
    bounds = {
        0,
        len(left) - 1,
        *(stage.first_step for stage in changed.stages),
        *(each["from"] for each in skips + withdrawn),
    }
    for bound in sorted(bounds):
        for step in (bound - 1, bound):
            if 0 < step < len(left):
                state = changed.iter(start_step=step, threads=0).get_state()
                again = load(amended).iter(threads=0)
                again.set_state(state)
                assert_same(next(again), changed[step])
    audited = load({**amended, "audit": str(folder / "audit")})
    batches = audited.iter(threads=0)
    for _ in range(len(left)):
        next(batches)
    batches.close()
    assert check_audit(folder / "audit.log", changed).findings == []
    unequal = [
        step
        for step in range(len(left))
        if any(
            (plain[step][key].shape != array.shape) or (plain[step][key] != array).any()
            for key, array in changed[step].items()
        )
    ]
    ends = plain.end_step != changed.end_step
    found = difference(plain, changed, steps=range(len(left) + (1 if ends else 0)))
    assert found.first_step == (unequal[0] if unequal else len(left) if ends else None)


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in MANY)])
def test_random_stages_with_random_amendments(corpora, tmp_path, seed):
    check_case(corpora, tmp_path, seed)
