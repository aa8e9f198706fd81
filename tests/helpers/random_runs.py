"""Random configs of one or more stages, with random amendments, and naive references of what the amendments do."""

import copy
import random

import numpy as np
from sft_files import documents, make_pairs, write_episodes, write_olmo, write_pairs

LAYOUTS = [
    {"kind": "windows", "max_target_sequence_length": 64},
    {"kind": "padded"},
    {"kind": "padded", "keep": "first", "min_tokens": 5},
    {"kind": "packed"},
    {"kind": "packed", "long_documents": "fragment"},
    {"kind": "packed", "sequence_length": 512},
    {"kind": "packed", "algorithm": "concat_then_split"},
]
COUNTING = {"ngram_filter": {"max_count": 12, "count_padding": True}}  # rows with 12 consecutive padding tokens fail
TRANSFORMS = [["shift_targets"], ["ngram_filter", "shift_targets"], [COUNTING, "shift_targets"]]


def write_corpora(folder):
    """Write corpora with masks, with weights, for rows of several lengths, and of pairs. Return their sections of configs."""
    one, vsl = (write_olmo(folder / str(count), documents(count, 3, longest=50)) for count in (80, 400))
    stated = [{"path": str(path), "eos_token_id": 2, "dtype": "uint16", "pad_token_id": 7} for path in (one, vsl)]
    other = write_episodes(folder / "other", documents(60, 5, weights=True, longest=40), shards=2)
    pairs = {"path": str(write_pairs(folder / "pairs", make_pairs(90, 4)))}
    return {"texts": [stated[0], {"path": str(other)}], "vsl": stated[1], "pairs": pairs}


def stage_of(drawn, corpora, hosts, order, kind):
    sampler = {"global_batch_size": hosts * drawn.randint(1, 2), "order": order}
    length = {"sequence_length": drawn.choice([16, 32, 64])}
    if kind == "pairs":
        layout = {**length, "kind": "pairs", "prompt_length": 8}
        return {"corpus": corpora["pairs"], "layout": layout, "sampler": sampler}
    if order != "episode" and drawn.random() < 0.2:
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
    elif drawn.random() < 0.5 or own["layout"]["sequence_length"] == 512:
        sampler["last_batch"] = "run_on"
    if schedule:
        sampler["schedule"] = schedule
    if drawn.random() < 0.3:
        own["transforms"] = drawn.choice(TRANSFORMS)
    return own


def case_of(corpora, seed, most=4):
    """Return (config, amendments, number of hosts), all random. The config has at most `most` stages."""
    drawn = random.Random(seed)
    hosts, order = drawn.randint(1, 8), drawn.choice(["shuffle", "olmo", "sequential", "episode"])
    kind = "pairs" if drawn.random() < 0.1 else "texts"
    count = drawn.choice([1, 1, *range(1, most + 1)])
    stages = [{"steps": drawn.randint(1, 6), **stage_of(drawn, corpora, hosts, order, kind)} for _ in range(count)]
    if len(stages) == 1 or drawn.random() < 0.5:
        del stages[-1]["steps"]
    mixed = ["".join(each["corpus"]["mixture"]) for each in stages if "mixture" in each["corpus"]]
    if len(stages) == 1 and not mixed and order != "episode":
        stages[0]["sampler"]["epochs"] = drawn.choice([None, 3])
    amendments = []
    for _ in range(drawn.randint(0, 4)):
        step, chosen = drawn.randrange(14), drawn.random()
        if chosen < 0.4:
            amendments.append({"skip": {"from": step, "steps": drawn.randint(1, 5)}})
        elif chosen < 0.7 and mixed:
            weights = {drawn.choice(drawn.choice(mixed)): drawn.randint(0, 4) + 0.5}
            amendments.append({"reweight": {"from": step, "weights": weights}})
        else:
            amendments.append({"withdraw": {"from": step, "documents": drawn.sample(range(40), drawn.randint(1, 25))}})
    return {"sampler": {"seed": drawn.randrange(5)}, "stages": stages}, amendments, hosts


def as_run(config, **more):
    """Return `config` with the keys `more`. If it has only one stage, the result states the run without stages."""
    if len(config["stages"]) > 1:
        return {**config, **more}
    (stage,) = config["stages"]
    return {**stage, "sampler": {**config["sampler"], **stage["sampler"]}, **more}


def sections_of(amendments, kind):
    return sorted((entry[kind] for entry in amendments if kind in entry), key=lambda each: each["from"])


def with_weights(config, bounds, reweights):
    """Return the config after all `reweights`, and whether each of them changed a stage.

    `reweights` has pairs (step, weights from this step on). The steps are those of the run without skips.
    """
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


def without(source, rows, gone):
    """Return `rows` with padding in the place of all tokens of the documents `gone`."""
    element = {key: array.copy() for key, array in source.read(rows).items()}
    for name, index, numbers in source.layout.split(rows):
        part, first = source.layout.parts[name], source.layout.first_document(name)
        starts, lengths = part.corpus.documents
        begins = np.cumsum([0, *(shard.num_tokens for shard in part.corpus.shards)])
        own_gone = [number - first for number in gone if 0 <= number - first < len(starts)]
        gone_tokens = {at for number in own_gone for at in range(starts[number], starts[number] + lengths[number])}
        for row, number in zip(index.tolist(), numbers.tolist(), strict=True):
            column = 0
            for span in part.spans(number):
                for token in range(span.start, span.stop):
                    if begins[span.shard] + token in gone_tokens:
                        for key, array in element.items():
                            array[row, column] = part.corpus.padding_token_id if key == "tokens" else 0
                    column += 1
    return element


def without_pairs(source, rows, gone):
    """Return `rows` of pairs with padding in the place of all tokens of the pairs `gone`."""
    element = {key: array.copy() for key, array in source.read(rows).items()}
    pieces = source.layout.pieces(rows)
    for at in np.flatnonzero(np.isin(pieces.document, list(gone))).tolist():
        place = pieces.row[at], slice(pieces.column[at], pieces.column[at] + pieces.length[at])
        for key, array in element.items():
            array[place] = source.layout.corpus.padding_token_id if key == "tokens" else 0
    return element
