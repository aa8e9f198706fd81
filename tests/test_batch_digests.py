"""The batches of shipped configs, layouts, orders and mixtures, and the files of templates, have the recorded digests.

`GRAIN_SFT_WRITE_DIGESTS=1 pytest tests/test_batch_digests.py` writes `golden/batch_digests.json`. Do so only for a
change of batches that the changelog announces.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from batches import sections
from episode_corpora import write_dataset
from mixed_corpora import mixture_config, write_sources
from prepared import CHAT_FORMATS, TEXTS, chats, openchat_chats, tool_chats
from sft_files import documents, write_episodes, write_olmo, write_openchat, write_primer
from template_rules import SPECIAL
from tokenizer_makers import byte_level_json, save_huggingface

import grain_sft
from grain_sft.layout.packing.numpy_sort import SORTS, numpy_sort
from grain_sft.prepare import TEMPLATES, Dataset, Request, materialize, prepare

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden" / "batch_digests.json"
CONFIGS = TESTS.parent / "configs"
HOSTS = (grain_sft.Host(0, 1), grain_sft.Host(1, 2))
STEPS = (0, 1, 2, 7, 40)
PRETRAINING = ("eval_8192.yaml", "pretrain_8192.yaml", "pretrain_8192_olmo_order.yaml")
SFT = ("sft_packed_32768.yaml", "olmo3_7b_think_sft.yaml", "olmo3_32b_think_sft.yaml")
Config = dict[str, Any]


def digest_of_batches(config: Config) -> str:
    digest = hashlib.sha256()
    for host in HOSTS:
        pipeline = grain_sft.load(config, host=host)
        for step in STEPS:
            if step < pipeline.end_step:
                for key, array in sorted(pipeline[step].items()):
                    digest.update(f"{host.index} {step} {key} {array.dtype} {array.shape}".encode())
                    digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()[:16]


def shipped(folder: Path) -> Iterator[tuple[str, Config]]:
    """Yield configs that each inherit a file of `configs/`, with a corpus of its format and shorter rows."""
    np.arange(700 * 512, dtype=np.uint32).tofile(folder / "tokens.npy")
    (folder / "mix.txt").write_text("label,tokens.npy\n")
    long = documents(3000, 1, longest=300)
    olmo = {"path": str(write_olmo(folder / "sft", long, dtype="uint32", part_tokens=90_000))}
    episodes = str(write_dataset(folder / "episodes", weighted=True))
    written = (write_primer(folder / f"primer{number}", documents(300, number, longest=400)) for number in range(3))
    primer = [{"path": str(path)} for path in written]
    openchat = {"path": str(write_openchat(folder / "openchat", documents(400, 9, longest=300)))}
    mix = {"path": str(folder / "mix.txt"), "dtype": "uint32"}
    short = {"layout": {"sequence_length": 512}}
    small = {**short, "sampler": {"global_batch_tokens": 512 * 32}}
    names = ("primer", "oasst1", "dolly15k")
    changes: dict[str, Config] = {
        **{name: {"corpus": mix, **small} for name in PRETRAINING},
        **{name: {"corpus": olmo, **small} for name in SFT},
        "episodes.yaml": {"corpus": {"path": episodes}},
        "episodes_gpt_config.json": {"dataset_dir": episodes},
        "primer.yaml": {"corpus": primer[0]},
        "primer_packed.yaml": {"corpus": primer[0]},
        "primer_mixture.yaml": {"corpus": {"mixture": dict(zip(names, primer, strict=True))}},
        "openchat.yaml": {"corpus": openchat, "layout": {"sequence_length": 900}},
        "sft_with_pretraining.yaml": {"corpus": {"mixture": {"chat": olmo, "web": mix}}, **short},
    }
    assert changes.keys() == {path.name for path in CONFIGS.iterdir()}
    for name, changed in changes.items():
        yield f"configs/{name}", {"inherits": str(CONFIGS / name), **changed}


def layouts(folder: Path) -> Iterator[tuple[str, Config]]:
    """Yield configs of layouts, packing algorithms and their options, over corpora of several formats."""
    paths = {
        "olmo": write_olmo(folder / "olmo", documents(400, 2, longest=60), sources=True),
        "episodes": write_episodes(folder / "weights", documents(300, 3, high=90_000, weights=True), shards=3, gap=2),
        "openchat": write_openchat(folder / "columns", documents(300, 4, longest=40), first_weights=True),
    }
    corpora: dict[str, Config] = {name: {"path": str(path)} for name, path in paths.items()}
    corpora["olmo"] |= {"dtype": "uint16", "eos_token_id": 2}
    corpora["openchat"] |= {"eos_token_id": 2}
    best = {"kind": "packed", "algorithm": "best_fit_decreasing"}
    repacked = {"kind": "packed", "seed": 5, "epochs": 3}  # each epoch is packed anew
    variants: dict[str, Config] = {
        "windows": {"kind": "windows"},
        "padded": {"kind": "padded"},
        "padded first": {"kind": "padded", "keep": "first", "min_tokens": 9},
        "best_fit_decreasing": best,
        "first_fit_decreasing": {**best, "algorithm": "first_fit_decreasing"},
        "multipack": {**repacked, "algorithm": "multipack"},
        "shuffled_best_fit": {**repacked, "algorithm": "shuffled_best_fit"},
        "concat_then_split": {**best, "algorithm": "concat_then_split", "long_documents": "fragment"},
        "fragments": {**best, "long_documents": "fragment"},
        "few segments": {**best, "max_segments": 3},
        "ends at EOS": {**best, "boundaries": "eos", "source_group_size": 3},
        **{f"ties {sort}": {**best, "ties": f"numpy:{sort}"} for sort in SORTS[SORTS.index(numpy_sort()) :]},
    }
    by_epoch = {"order": "sequential", "shuffle": False, "epochs": 1}
    for name, corpus in corpora.items():
        for variant, layout in variants.items():
            own_order = by_epoch if "epochs" in layout else {"order": "shuffle"}
            config = sections(None, 48, corpus=corpus, layout=layout, seed=3, global_batch_size=8, **own_order)
            for transforms in (["shift_targets"], ["ngram_filter", "shift_targets"]):
                yield f"layout/{name}/{variant}/{transforms[0]}", {**config, "transforms": transforms}


def materialized(folder: Path) -> Iterator[tuple[str, Config]]:
    """Yield configs of materialized rows, one with masks and one with weights."""
    masks = write_olmo(folder / "olmo", documents(300, 2, longest=60), sources=True)
    weights = write_episodes(folder / "weights", documents(300, 3, high=90_000, weights=True), shards=3, gap=2)
    opened = {"olmo": {"dtype": "uint16", "eos_token_id": 2}, "weights": {}}
    for path in (masks, weights):
        layout = grain_sft.PackedLayout(grain_sft.open_corpus(path, **opened[path.name]), 48)
        materialize(layout, folder / f"{path.name}-rows")
        options = {"layout": "materialized", "order": "shuffle", "seed": 3, "global_batch_size": 8}
        yield f"materialized/{path.name}", sections(folder / f"{path.name}-rows", 48, **options)


def orders(folder: Path) -> Iterator[tuple[str, Config]]:
    """Yield configs of orders with each `last_batch`: plain, with a schedule of batch sizes, and unshuffled."""
    np.random.default_rng(1).integers(3, 250, 101 * 16).astype(np.uint16).tofile(folder / "rows.npy")
    base = sections(folder / "rows.npy", 16, corpus={"dtype": "uint16"}, layout="windows")
    base["transforms"] = ["shift_targets", "drop_last_position"]
    schedule = [{"step": 2, "global_batch_size": 12}, {"step": 7, "global_batch_size": 20}]
    for order in ("shuffle", "olmo", "maxtext", "episode", "openchat", "random", "sequential"):
        for last in ("drop", "fill", "run_on"):
            if last == "fill" and order in ("maxtext", "random"):
                continue
            for name, more in {"": {}, " schedule": {"schedule": schedule}, " unshuffled": {"shuffle": False}}.items():
                sampler = {"order": order, "seed": 11, "global_batch_size": 6, "last_batch": last, **more}
                yield f"order/{order}/{last}{name}", {**base, "sampler": sampler}


def mixtures(folder: Path) -> Iterator[tuple[str, Config]]:
    """Yield configs of mixtures: with exhausted sources, schedules of weights and sizes, and mixtures of mixtures."""
    write_sources(folder)
    yield "mixture/plain", mixture_config(folder)
    weights = [{"step": 3, "weights": {"chat": 0.1, "web": 0.5}}, {"step": 5, "global_batch_size": 24}]
    yield "mixture/schedule", mixture_config(folder, schedule=weights)
    for exhausted in ("repeat", "stop", "renormalize"):
        config = mixture_config(folder, on_exhausted=exhausted)
        if exhausted != "repeat":
            config["corpus"]["mixture"]["web"]["sampler"] = {"epochs": 1}
        yield f"mixture/{exhausted}", config
    nested = mixture_config(folder)
    outer = nested["corpus"]["mixture"]
    outer["rest"] = {"weight": 0.3, "mixture": {name: outer.pop(name) for name in ("talks", "web")}}
    yield "mixture/nested", nested


def tokenized(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield digests of the token and loss files of each template in each format, or the name of the error."""
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    save_huggingface(folder / "hf", byte_level_json(SPECIAL), eos="<|endoftext|>", chat_template=template)
    files = {
        "texts": [{"text": str(each)} for each in TEXTS],
        "chats": chats(),
        "openchat": openchat_chats(),
        "tools": tool_chats(),
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    for name in TEMPLATES:
        chosen = {"openchat": "openchat", "episode_tool": "tools", "text": "texts"}.get(name, "chats")
        inputs = (Dataset((str(folder / f"{chosen}.jsonl"),)),)
        for format in CHAT_FORMATS:
            out = folder / f"{name}-{format}"
            digest = hashlib.sha256()
            try:
                prepare(Request(inputs, name, str(folder / "hf"), format, val_frac=0.2), out, workers=1)
            except grain_sft.GrainSftError as error:
                yield f"template/{name}/{format}", type(error).__name__
                continue
            for path in sorted(out.rglob("*")):
                if path.suffix in (".npy", ".bin", ".idx"):
                    digest.update(f"{path.relative_to(out)} ".encode() + path.read_bytes())
            yield f"template/{name}/{format}", digest.hexdigest()[:16]


def rows_of_orders() -> Iterator[tuple[str, str]]:
    """Yield digests of the row numbers that orders of many rows give. This needs no corpus."""
    for order in ("shuffle", "olmo", "episode", "openchat", "maxtext", "random"):
        digest = hashlib.sha256()
        for host in (grain_sft.Host(0, 1), grain_sft.Host(5, 8)):
            rows = 3_000_001 if order == "shuffle" else 100_003
            sampler = grain_sft.IndexSampler(rows, global_batch_size=64, seed=7, order=order, host=host)
            for step in (0, 1, 99, 5000, 123_456):
                digest.update(sampler.rows(step).astype("<i8"))
        yield f"rows/{order}", digest.hexdigest()[:16]


def all_digests(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in (shipped, layouts, materialized, orders, mixtures):
        place = folder / part.__name__
        place.mkdir()
        for name, config in part(place):
            try:
                found[name] = digest_of_batches(config)
            except grain_sft.GrainSftError as error:
                found[name] = type(error).__name__
    (folder / "tokenized").mkdir()
    return found | dict(tokenized(folder / "tokenized")) | dict(rows_of_orders())


def test_all_digests_equal_the_recorded_ones(tmp_path, own_cache):
    found = all_digests(tmp_path)
    if "GRAIN_SFT_WRITE_DIGESTS" in os.environ:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    beyond = [f"/ties {sort}/" for sort in SORTS[: SORTS.index(numpy_sort())]]  # sorts of numpy that this CPU can't run
    recorded = json.loads(GOLDEN.read_text())
    assert found == {name: digest for name, digest in recorded.items() if not any(part in name for part in beyond)}
