"""Runs with equal batches have equal receipts. A change of anything that decides batches changes the receipt."""

import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
from batches import Plain, load, pipeline_of, sections, write_config
from sft_files import documents, write_olmo

import grain_sft
from grain_sft import Host, PackedLayout, PaddedLayout, open_corpus
from grain_sft.config.sections import CORPUS, SAMPLER, TOP, all_layout_options, layout_options
from grain_sft.pipeline import Receipt, layout_receipt
from grain_sft.pipeline.receipt import described

DOCS = documents(60)
for tokens, _ in DOCS[::2]:
    tokens[0] = 3  # a BOS, at the start of every second document


@pytest.fixture
def config(tmp_path):
    write_olmo(tmp_path / "sft", DOCS)
    stated = sections(tmp_path / "sft", 32, corpus={"dtype": "uint16", "eos_token_id": 2}, seed=3, epochs=2)
    return stated | {"transforms": ["shift_targets"]}


def receipt(config, host=None, **changes):
    """Return the receipt of `config` after `changes`, a mapping from sections to their changed keys.

    Other keys of the section stay, unless its change has a `kind`. The value None removes a key.
    """
    for section, change in changes.items():
        if isinstance(change, dict):
            change = ({} if "kind" in change else config[section]) | change
            change = {key: value for key, value in change.items() if value is not None}
        config = config | {section: change}
    return load(config, host=host or Host(0, 1)).receipt


EVERY_EPOCH = {"order": "sequential", "epochs": 1}  # sampler of layouts that pack each epoch by itself
PADDED = {"kind": "padded", "sequence_length": 32}

LAYOUTS = [{"sequence_length": 64}, {"algorithm": "concat_then_split"}, {"source_group_size": 2}, {"max_segments": 1}]
LAYOUTS += [PADDED, {"kind": "windows", "sequence_length": 32}, {"sequence_length": 16, "long_documents": "fragment"}]
LAYOUTS += [{"boundaries": "eos"}, {"boundaries": "eos", "bos_token_id": 3}, {**PADDED, "min_tokens": 12}]
LAYOUTS += [{**PADDED, "sequence_length": 16, "keep": keep} for keep in ("first", "last")]
SAMPLERS = [{"order": order} for order in ("shuffle", "balanced", "maxtext")]
SAMPLERS += [{"shuffle": False}, {"seed": 4}, {"global_batch_size": 8}, {"epochs": 3}, {"last_batch": "fill"}]
SAMPLERS += [{"last_batch": "run_on"}, {"global_batch_size": None, "global_batch_tokens": 512}]
SAMPLERS += [{"schedule": [{"step": step, "global_batch_size": 8}]} for step in (2, 3)]
FILTERS = [{"ngram_filter": options} for options in ({}, {"max_count": 3}, {"count_padding": True})]
TRANSFORMS = [[], *([each, "shift_targets"] for each in FILTERS)]
TRANSFORMS += [[{"trim_to_multiple": {"multiple": 8}}, "shift_targets"], ["shift_targets", "drop_last_position"]]
CORPORA = [{"use_loss_mask": False}, {"pad_token_id": 7}, {"eos_token_id": 5}]
PACKED = [{"seed": 1}, {"seed": 2}, {"seed": 1, "epochs": 2}]
BATCH_ROWS = {"algorithm": "shuffled_best_fit", "seed": 1, "batch_rows": 4}
CHANGES = [{"layout": each} for each in LAYOUTS] + [{"sampler": each} for each in SAMPLERS]
CHANGES += [{"transforms": each} for each in TRANSFORMS] + [{"corpus": each} for each in CORPORA]
CHANGES += [{"layout": {"algorithm": "multipack", **each}, "sampler": EVERY_EPOCH} for each in PACKED]
CHANGES += [{"layout": BATCH_ROWS, "sampler": EVERY_EPOCH | {"global_batch_size": 2}}]


def test_every_key_that_changes_batches_changes_the_receipt(config):
    codes = {str(change): receipt(config, **change).code for change in [{}, *CHANGES]}
    assert len(set(codes.values())) == len(codes) == len(CHANGES) + 1, codes
    assert all(code.startswith("gs2-") and len(code) == 20 for code in codes.values())


# Keys that change no batch.
CHANGES_NOTHING = {"path", "label_mask_paths", "format", "path_remap", "root", "remote"}
CHANGES_NOTHING |= {"tokenizer", "audit", "observers"}

TESTED_ELSEWHERE = {
    *("amendments", "stages", "max_target_sequence_length"),  # in test_amendments.py and test_stages.py
    *("dtype", "ties"),  # below, in the tests of the width of tokens and of equal rows
    *("mixture", "on_exhausted"),  # in mixture/
    *("prompt_length", "long_pairs"),  # in layout/test_pairs.py
    *layout_options("megatron_gpt"),  # in layout/test_megatron_gpt.py
    *(*layout_options("olmo_vsl"), "curriculum", "num_cycles", "balanced"),  # in layout/test_olmo_vsl.py
    *("split", "subset"),  # in corpus/test_megatron.py
}


def test_every_key_of_a_config_is_tested_here_or_in_a_named_file_or_changes_nothing():
    changed = {key for change in CHANGES for part in change.values() if isinstance(part, dict) for key in part}
    known = {*CORPUS, *all_layout_options(), *SAMPLER, *TOP} - {"inherits"}
    assert known == changed | {"transforms"} | CHANGES_NOTHING | TESTED_ELSEWHERE


def test_the_width_of_tokens_changes_the_receipt(tmp_path):
    np.zeros(4096, np.uint8).tofile(tmp_path / "tokens.npy")
    config = sections(tmp_path / "tokens.npy", 32, layout="windows", order="sequential", global_batch_size=2)
    assert len({receipt(config, corpus={"dtype": dtype}).code for dtype in ("uint8", "uint16", "uint32")}) == 3


def test_other_tokens_masks_or_padding_change_the_receipt(config, tmp_path):
    before = receipt(config)
    tokens, loss = DOCS[0]
    changed = {"tokens": ((tokens + 1) % 3 + 5, loss), "mask": (tokens, ~loss)}
    paths = [str(write_olmo(tmp_path / name, [first, *DOCS[1:]])) for name, first in changed.items()]
    assert len({before.code, *(receipt(config, corpus={"path": path}).code for path in paths)}) == 3
    pipeline = load(config)
    object.__setattr__(pipeline.source.layout.corpus, "pad_token_id", 9)
    assert [line.split()[0] for line in pipeline.receipt.differences(before.parts)] == ["padding"]


def test_hosts_paths_threads_and_caches_do_not_change_the_receipt(config, tmp_path, monkeypatch):
    code = receipt(config).code
    assert receipt(config, Host(1, 2)).code == code
    shutil.copytree(tmp_path / "sft", tmp_path / "elsewhere" / "copy")
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "another cache"))
    copied = {"path": str(tmp_path / "elsewhere" / "copy")}
    assert receipt(config, corpus=copied).code == code
    assert receipt(config, corpus={**copied, "format": "olmo"}, audit=str(tmp_path / "audit.log")).code == code
    remapped = {**copied, "tokenizer": "a name", "path_remap": {"/a": str(tmp_path / "sft")}}
    assert receipt(config, corpus=remapped).code == code
    pipeline = load(config)
    next(pipeline.iter(threads=1, prefetch=2))
    assert pipeline.receipt.code == code


def test_the_number_of_hosts_changes_only_the_receipt_of_order_maxtext_and_an_unused_seed_changes_none(config):
    codes = [receipt(config, host, sampler={"order": "maxtext"}).code for host in (Host(0, 2), Host(1, 2), Host(0, 4))]
    assert codes[0] == codes[1] != codes[2]
    for unused in ({"order": "sequential"}, {"shuffle": False}):
        assert len({receipt(config, sampler={**unused, "seed": seed}).code for seed in (1, 2)}) == 1


def test_layouts_have_equal_receipts_exactly_if_their_rows_are_equal(tmp_path):
    random = np.random.default_rng(0)

    def corpus(name, lengths):
        tokens = [np.append(random.integers(3, 900, length - 1), 2) for length in random.permutation(lengths)]
        docs = [(each.astype(np.uint32), np.ones(len(each), bool)) for each in tokens]
        return open_corpus(write_olmo(tmp_path / name, docs, part_tokens=400), dtype="uint16", eos_token_id=2)

    no_ties, ties = corpus("no ties", range(3, 60)), corpus("ties", [7] * 300 + [9] * 300)
    for each, has_ties in ((no_ties, False), (ties, True)):
        layouts = [PackedLayout(each, 64, ties=how) for how in ("stable", "numpy")]
        equal = all(layouts[0].spans(row) == layouts[1].spans(row) for row in range(len(layouts[0])))
        assert equal == (layout_receipt(layouts[0]) == layout_receipt(layouts[1]))
        assert equal or has_ties
    fit = functools.partial(PackedLayout, no_ties, 64, algorithm="first_fit_decreasing")
    cut, fragmented = (layout_receipt(fit(long_documents=how)) for how in ("truncate", "fragment"))
    assert cut == fragmented  # no document is longer than a row
    pairs = [(length, keep) for length in (64, 32) for keep in ("last", "first")]
    kept = [layout_receipt(PaddedLayout(no_ties, length, keep=keep)) for length, keep in pairs]
    assert kept[0] == kept[1] and len(set(kept)) == 3
    assert kept[0].startswith("rows2-")


def test_differences_between_receipts_are_named_by_part(config):
    here, there = receipt(config), receipt(config, sampler={"seed": 4}, transforms=[])
    found = here.differences(there.parts)
    assert [line.split()[0] for line in found] == ["sampler", "transforms"]
    assert "seed=3" in found[0] and "seed=4" in found[0]
    assert here.differences(here.parts) == []
    assert here.differences({}) and Receipt({}).differences(here.parts)


def test_the_receipt_of_a_known_run_does_not_change(tmp_path):
    """Logs and plans contain receipts. If the text that is hashed changes, gs2 has to become gs3, and rows2 rows3."""
    np.arange(640, dtype="<u4").tofile(tmp_path / "tokens.npy")
    layout = grain_sft.WindowLayout(open_corpus(tmp_path / "tokens.npy", eos_token_id=1), 32)
    assert pipeline_of(layout, order="shuffle").receipt.code == "gs2-d29a09bb31c128fc"
    packed = PackedLayout(open_corpus(tmp_path / "tokens.npy", eos_token_id=99), 128)
    assert layout_receipt(packed) == "rows2-91e8b6625fed4e7a"


def test_the_command_prints_the_code_and_the_parts(config, tmp_path, run_command):
    path = write_config(tmp_path / "run.json", config)
    expected = receipt(config)
    assert expected.as_dict() == {"receipt": expected.code, "parts": expected.parts}
    assert json.loads(run_command("receipt", path, "--json").out) == expected.as_dict()
    lines = run_command("receipt", path, "--host", "1/2").out.splitlines()
    assert lines[0] == expected.code
    assert [line.split()[0] for line in lines[1:]] == ["corpus", "layout", "padding", "sampler", "transforms"]
    run_command("receipt", path, "--host", "2/2", status=2)


class WithSlots(Plain):
    __slots__ = ("value",)


@dataclasses.dataclass
class Stated(Plain):
    value: object


TABLE = np.arange(5000)
CHANGED = np.where(TABLE == 2000, 1, TABLE)
ARRAYS = (TABLE, CHANGED, np.array([0.12345678901, 1]), np.array([0.12345678902, 1]))


@pytest.mark.parametrize("kind", [Plain, WithSlots, Stated])
def test_a_users_transform_is_described_by_all_array_elements_and_without_memory_addresses(kind):
    """The repr of numpy shows neither all elements nor all digits. Arrays may be inside lists and objects."""
    hashed = [*ARRAYS, [TABLE], {"of": CHANGED}, *map(Stated, ARRAYS), *([Stated(array)] for array in ARRAYS)]
    texts = [described(kind(value)) for value in (*hashed, 3, 4)]
    assert len(set(texts)) == len(texts) and all("#" in text for text in texts[:-2])
    assert described(kind(TABLE.copy())) == texts[0] and "#" not in described(kind(TABLE[:9]))
    assert described(kind(TABLE.reshape(50, 100))) != described(kind(TABLE.reshape(100, 50)))
    assert described(kind([TABLE, np.int32])).endswith(texts[4][-17:])  # np.int32, a class, is not hashed
    assert "0x" not in described(kind(len)) + described(kind(described))


def test_sets_are_described_in_one_order():
    assert described(Plain({"b", "c", "a"})).endswith("value={'a', 'b', 'c'})")
    assert described(Plain({3, 1})) == described(Plain({1, 3}))
    for value in ({0.5, 0.25}, frozenset({"a"}), frozenset()):
        assert described(Plain(value)).endswith(f"value={value!r})")
    of = frozenset({"b", "a", "d"})
    for transform in (Stated(of), Plain([of]), Plain({"k": of}), Stated(Stated(of)), Plain({of}), Stated({of, "c"})):
        assert "{'a', 'b', 'd'}" in described(transform)
    assert described(Stated("{'b', 'a'}")).endswith("{'b', 'a'}\")")  # a text, not a set
    loop = Stated(None)
    loop.value = [loop, {"b", "a"}]
    assert described(loop).startswith("Stated(value=[..., {")


def test_arrays_that_numpy_prints_exactly_are_described_by_their_values():
    for exact in ([0.1, 0.25, -1], [1e300, 1e-300], [np.nan, np.inf], [1, 2e-7]):
        value = np.array(exact)
        assert described(Stated(value)) == f"Stated(value={value!r})"
    assert described(Plain(np.float32([0.1, 3]))).endswith("value=array([0.1, 3. ], dtype=float32))")
