"""The EOS id of a tokenizer's folder, read without loading the tokenizer."""

from __future__ import annotations

import dataclasses

from grain_sft.corpus.formats.metadata import Json, Origin
from grain_sft.corpus.formats.tree import Tree
from grain_sft.errors import GrainSftError
from grain_sft.storage import files


def eos_of_folder(folder: str, tree: Tree, origin: Origin) -> Origin:
    """`origin` with the EOS and padding ids of `folder`/tokenizer, where its files say them. A guess: a tokenizer
    whose files don't parse says nothing."""
    if "tokenizer" not in tree.names(folder):
        return origin
    place = files.join(folder, "tokenizer")
    names = tree.names(place)
    try:
        configs = [Json.load(files.join(place, name)) for name in _CONFIGS if name in names]
        texts = [_token(configs, key) for key in ("eos_token", "pad_token")]
        ids = dict(_added_tokens(configs))
        if any(text is not None and text not in ids for text in texts) and "tokenizer.json" in names:
            model = Json.load(files.join(place, "tokenizer.json"))
            for entry in model.items("added_tokens"):
                ids[entry["content"]] = entry["id"]
            vocabulary = model.object("model").get("vocab")
            if isinstance(vocabulary, dict):
                ids = {**vocabulary, **ids}
        found = [ids.get(text) if text is not None else None for text in texts]
        eos, pad = [each if type(each) is int and each >= 0 else None for each in found]
    except (GrainSftError, KeyError, TypeError, ValueError):
        return origin
    return dataclasses.replace(
        origin,
        eos_token_id=eos if origin.eos_token_id is None else origin.eos_token_id,
        pad_token_id=pad if origin.pad_token_id is None else origin.pad_token_id,
    )


_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


def _token(configs: list[Json], key: str) -> str | None:
    """The text of a special token: a string, or an object with its content."""
    for config in configs:
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None


def _added_tokens(configs: list[Json]) -> list[tuple[str, int]]:
    return [
        (entry["content"], int(number))
        for config in configs
        for number, entry in config.object("added_tokens_decoder").entries()
    ]
