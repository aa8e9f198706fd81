"""Random runs with random amendments, against a reference that deletes steps from a list and tokens from arrays one by one."""

import hashlib
import json
import os
import pickle
import random
import signal
import traceback

import numpy as np
import pytest
from batches import assert_same, load
from sft_files import documents, write_episodes, write_olmo

from grain_sft import Host
from grain_sft.provenance import check_audit

FEW, MANY = (*range(8), 44, 59), range(60, 308)
LAYOUTS = [
    {"kind": "windows"},
    {"kind": "padded"},
    {"kind": "padded", "keep": "first", "min_tokens": 5},
    {"kind": "packed"},
    {"kind": "packed", "long_documents": "fragment"},
    {"kind": "packed", "sequence_length": 512},
    {"kind": "packed", "algorithm": "concat_then_split"},
]
ORDERS = ["shuffle", "olmo", "maxtext", "episode", "sequential"]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return two_corpora(tmp_path_factory.mktemp("amended"))


def two_corpora(folder):
    """Write a corpus with masks and one with weights, and return the sections `corpus`."""
    one = write_olmo(folder / "one", documents(80, 3, longest=40))
    other = write_episodes(folder / "other", documents(60, 5, weights=True, longest=40), shards=2)
    return [{"path": str(one), "eos_token_id": 2, "dtype": "uint16", "pad_token_id": 7}, {"path": str(other)}]


def case_of(corpora, seed):
    """Return a random config without amendments, amendments, and a host."""
    drawn = random.Random(seed)
    host = Host(drawn.randrange(count := drawn.randint(1, 8)), count)
    layout = {"sequence_length": 32, **drawn.choice(LAYOUTS)}
    mixed = drawn.random() < 0.4
    sampler = {"seed": drawn.randrange(5), "order": drawn.choice(ORDERS), "global_batch_size": count}
    schedule = [{"step": drawn.randrange(1, 12), "global_batch_size": 2 * count}] if drawn.random() < 0.5 else []
    corpus = drawn.choice(corpora)
    if mixed:
        if sampler["order"] == "maxtext":
            sampler["order"] = "olmo"
        sources = {name: {"weight": drawn.randint(1, 3), **each} for name, each in zip("ab", corpora, strict=True)}
        sources["b"]["layout"], corpus = {"kind": "windows"} if drawn.random() < 0.5 else {}, {"mixture": sources}
        if drawn.random() < 0.5:
            schedule.append({"step": 12, "weights": {"b": drawn.randint(4, 7)}})
    else:
        sampler["last_batch"] = "run_on" if drawn.random() < 0.5 or layout["sequence_length"] == 512 else "drop"
        sampler["epochs"] = drawn.choice([None, 3])
    config = {"corpus": corpus, "layout": layout, "sampler": sampler | ({"schedule": schedule} if schedule else {})}
    counting = {
        "ngram_filter": {"max_count": 12, "count_padding": True}
    }  # fails rows with 12 tokens of padding in a run
    filters = ["ngram_filter"], [counting], []
    config["transforms"] = drawn.choice([[*drawn.choice(filters), "shift_targets"], []])
    amendments = [amendment_of(drawn, mixed) for _ in range(drawn.randint(1, 4))]
    return config, amendments, host


def amendment_of(drawn, mixed):
    step = drawn.randrange(14)
    kind = drawn.choice(["skip", "withdraw", *(["reweight"] if mixed else [])])
    if kind == "skip":
        return {"skip": {"from": step, "steps": drawn.randint(1, 5)}}
    if kind == "withdraw":
        return {"withdraw": {"from": step, "documents": drawn.sample(range(60), drawn.randint(1, 25))}}
    return {"reweight": {"from": step, "weights": {drawn.choice("ab"): drawn.randint(0, 4) + 0.5}}}


def reference(config, amendments, host, steps):
    """Yield what each of the trainer's `steps` sees, or None after the end."""
    left, entries = list(range(200)), {each["step"]: dict(each) for each in config["sampler"].get("schedule", [])}
    sections = sorted(
        ((kind, each) for entry in amendments for kind, each in entry.items()), key=lambda pair: pair[1]["from"]
    )
    for kind, each in sections:
        if kind == "skip":
            del left[each["from"] : each["from"] + each["steps"]]
    sources = config["corpus"].get("mixture", {})
    weights = {name: each["weight"] for name, each in sources.items()}
    for kind, each in sections:
        if kind == "reweight":
            step = left[each["from"]]
            now = dict(weights)
            for at in sorted(at for at in entries if at <= step):
                now |= entries[at].get("weights", {})
            now |= each["weights"]
            if step:
                entries.setdefault(step, {"step": step})["weights"] = now
            else:
                weights = now
    mixture = {name: {**each, "weight": weights[name]} for name, each in sources.items()}
    corpus = {"mixture": mixture} if sources else config["corpus"]
    schedule = {"schedule": [entries[step] for step in sorted(entries)]} if entries else {}
    plain = load({**config, "corpus": corpus, "sampler": {**config["sampler"], **schedule}}, host)
    for step in steps:
        if plain.num_steps is not None and left[step] >= plain.num_steps:
            yield None
            continue
        rows = plain.sampler.rows(left[step])
        withdrawn = [each["documents"] for kind, each in sections if kind == "withdraw" and each["from"] <= step]
        element = without(plain.source, rows, set().union(*withdrawn))
        for transform in plain.transforms:
            element = transform.map(element)
        yield element


def without(source, rows, gone):
    """Return `rows` with the tokens of the documents `gone` as padding, token by token."""
    element = {key: array.copy() for key, array in source.read(rows).items()}
    for name, at, own in source.layout.split(rows):
        part, first = source.layout.parts[name], source.layout.first_document(name)
        starts, lengths = part.corpus.documents
        begins = np.cumsum([0, *(shard.num_tokens for shard in part.corpus.shards)])
        held = {
            int(at)
            for number in gone
            if 0 <= number - first < len(starts)
            for at in range(starts[number - first], (starts + lengths)[number - first])
        }
        for row, number in zip(at.tolist(), own.tolist(), strict=True):
            column = 0
            for span in part.spans(number):
                for token in range(span.start, span.stop):
                    if begins[span.shard] + token in held:
                        for key, array in element.items():
                            array[row, column] = part.corpus.padding_token_id if key == "tokens" else 0
                    column += 1
    return element


def check_case(corpora, seed):
    config, amendments, host = case_of(corpora, seed)
    plain, changed = load(config, host), load({**config, "amendments": amendments}, host)
    first = min(each["from"] for entry in amendments for each in entry.values())
    in_a_worker = pickle.loads(pickle.dumps(changed))
    for step, expected in enumerate(reference(config, amendments, host, range(18))):
        if expected is None:
            assert changed.num_steps == step
            break
        batch = (in_a_worker if step % 3 else changed)[step]
        assert_same(batch, expected)
        for array in batch.values():
            if array.flags.writeable:
                array.fill(7)  # a trainer may write to its batch, and no later one shows it
        if step < first:
            assert_same(changed[step], plain[step])


@pytest.fixture(params=[False, True], ids=["short", "long"])
def long_segments(request, monkeypatch):
    if request.param:  # rows are read segment by segment
        monkeypatch.setattr("grain_sft.corpus.shard.LONG_SEGMENT", 0)


@pytest.mark.usefixtures("long_segments")
@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in MANY)])
def test_a_random_run_with_random_amendments(corpora, seed):
    check_case(corpora, seed)


def run_until_killed(config, folder, die):
    """Run in a child that writes the hash of each batch and then its state, and dies at a place `die` (batches, before the
    state); return whether it did."""
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


STEPS = 16


def hash_of(batch):
    return hashlib.sha256(b"".join(batch[key].tobytes() for key in sorted(batch))).hexdigest()


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(4, 24))])
def test_kills_around_every_boundary_and_amendments_made_between_them(corpora, tmp_path, seed):
    config, amendments, _ = case_of(corpora, seed)
    config["sampler"].pop("epochs", None)
    config["audit"] = str(tmp_path / "audit")
    amendments.sort(key=lambda entry: next(iter(entry.values()))["from"])
    boundaries = {max(0, each["from"] + more) for entry in amendments for each in entry.values() for more in (-1, 0)}
    done, kills = 0, 0
    while done < STEPS:
        known = [entry for entry in amendments if next(iter(entry.values()))["from"] <= done + 1]  # those made by now
        at = min((step for step in boundaries if step >= done), default=STEPS)
        boundaries.discard(at)
        killed = run_until_killed({**config, "amendments": known}, tmp_path, (at - done, (seed + at) % 2 == 0))
        kills += killed
        done = at + 1 if (seed + at) % 2 else at
        if not killed:
            break
    whole = load({**config, "amendments": amendments})
    expected = {step: hash_of(whole[step]) for step in range(STEPS)}
    for ending in ("log", "jsonl"):
        assert check_audit(tmp_path / f"audit.{ending}", whole).findings == []
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert kills and all(expected[int(step)] == found for step, found in lines)
    assert {int(step) for step, _ in lines} == set(range(STEPS))
