"""A mixture of three sources with different formats, dtypes, layouts, kinds of loss, orders and padding."""

import numpy as np
from batches import load, sections
from sft_files import documents, write_episodes, write_olmo

from grain_sft import Host

LENGTH = 16


def write_sources(folder):
    """Write the sources chat (loss masks, uint16), talks (loss weights, uint32) and web (no loss file, uint8)."""
    write_olmo(folder / "chat", documents(60, seed=1), sources=True)
    write_episodes(folder / "talks", documents(25, seed=2, high=90_000, weights=True))
    np.random.default_rng(3).integers(3, 250, 40 * LENGTH).astype(np.uint8).tofile(folder / "web.npy")


def mixture_config(folder, **sampler):
    chat = {"weight": 0.7, "path": str(folder / "chat"), "dtype": "uint16", "eos_token_id": 2, "pad_token_id": 1}
    chat |= {"layout": {"kind": "packed"}, "sampler": {"order": "olmo", "seed": 5}}
    talks = {"weight": 0.2, "path": str(folder / "talks")}
    talks |= {"layout": {"kind": "padded"}, "sampler": {"order": "episode"}}
    web = {"weight": 0.1, "path": str(folder / "web.npy"), "dtype": "uint8"}
    corpus = {"mixture": {"chat": chat, "talks": talks, "web": web}}
    sampler = {"order": "shuffle", "seed": 3, "global_batch_size": 12, **sampler}
    return sections(None, LENGTH, corpus=corpus, layout="windows", **sampler) | {"transforms": ["shift_targets"]}


def mixed(folder, host=Host(0, 1), **sampler):
    return load(mixture_config(folder, **sampler), host)
