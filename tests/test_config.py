"""`load`: a config is the five nouns as they are, and each of its mistakes has a sentence."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from sft_files import EOS, documents, write_olmo

import grain_sft
from grain_sft import PackedLayout, PaddedLayout
from grain_sft.errors import ConfigError, CorpusError, CorpusFileError, LayoutError, TransformError
from grain_sft.sampling import Host

yaml = pytest.importorskip("yaml")

LENGTH = 8
ROWS = 30
HOST = Host(0, 1)


@pytest.fixture
def data(tmp_path, write_tokens):
    """`tmp_path/data`: a mix of two files, ROWS rows in all."""
    write_tokens("data/a.npy", np.arange(20 * LENGTH), "uint16")
    write_tokens("data/b.npy", np.arange(10 * LENGTH) + 1000, "uint16")
    (tmp_path / "data" / "mix.txt").write_text("web,a.npy\ncode,b.npy\n")
    return tmp_path / "data"


@pytest.fixture
def config(data):
    return {
        "corpus": {"path": str(data / "mix.txt"), "dtype": "uint16", "eos_token_id": 5},
        "layout": {"kind": "windows", "sequence_length": LENGTH},
        "sampler": {"order": "shuffle", "seed": 3, "global_batch_size": 6, "epochs": 2},
        "transforms": [{"ngram_filter": {"max_period": 5, "max_count": 3}}, "shift_targets"],
    }


def write(path, config):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config) if path.suffix in (".yaml", ".yml") else json.dumps(config))
    return path


def error_of(config):
    with pytest.raises(grain_sft.GrainSftError) as error:
        grain_sft.load(config, host=HOST)
    return str(error.value)


def put(config, place, value):
    """A copy of `config` with `value` at `place`, keys joined by dots."""
    changed = copy.deepcopy(config)
    *sections, key = place.split(".")
    where = changed
    for section in sections:
        where = where[section]
    where[key] = value
    return changed


def same_batches(one, other):
    assert repr(one) == repr(other) and len(one) == len(other)
    for step in range(len(one)):
        left, right = one[step], other[step]
        assert list(left) == list(right)
        for key, array in left.items():
            np.testing.assert_array_equal(array, right[key])


def test_a_config_is_the_pipeline_it_states(config, data):
    corpus = grain_sft.open_corpus(data / "mix.txt", dtype="uint16", eos_token_id=5)
    source = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, LENGTH))
    sampler = grain_sft.IndexSampler(ROWS, global_batch_size=6, seed=3, epochs=2)
    transforms = [grain_sft.NgramFilter(max_period=5, max_count=3), grain_sft.ShiftTargets()]
    loaded = grain_sft.load(config, host=HOST)
    assert len(loaded) == 10
    same_batches(loaded, grain_sft.Pipeline(source, sampler, transforms))


def test_a_dict_and_its_json_and_yaml_are_one_config(config, tmp_path):
    expected = grain_sft.load(config, host=HOST)
    for name in ("a.json", "a.yaml", "a.yml"):
        path = write(tmp_path / "configs" / name, config)
        same_batches(grain_sft.load(path, host=HOST), expected)
        same_batches(grain_sft.load(str(path), host=HOST), expected)


def test_a_dict_is_left_as_it_was(config, tmp_path):
    base = write(tmp_path / "base.json", config)
    for given in (config, {"inherits": str(base), "sampler": {"global_batch_tokens": 2 * LENGTH}}):
        before = copy.deepcopy(given)
        grain_sft.load(given, host=HOST)
        assert given == before


def test_the_host_given_is_the_one_that_reads(config):
    whole = grain_sft.load(config, host=HOST)
    parts = [grain_sft.load(config, host=Host(index, 3)) for index in range(3)]
    for step in range(len(whole)):
        for index, part in enumerate(parts):
            np.testing.assert_array_equal(part[step]["inputs"], whole[step]["inputs"][index::3])


def test_without_a_host_it_is_this_process_of_jax(config):
    assert grain_sft.load(config).sampler.host == Host(0, 1)


def test_without_transforms_targets_are_shifted_and_nothing_else_is_done(config):
    del config["transforms"]
    assert repr(grain_sft.load(config, host=HOST).transforms) == "(ShiftTargets(),)"
    assert grain_sft.load({**config, "transforms": []}, host=HOST).transforms == ()


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("ngram_filter", "NgramFilter(max_period=13, min_period=1, max_count=32, count_padding=False)"),
        ({"ngram_filter": None}, "NgramFilter(max_period=13, min_period=1, max_count=32, count_padding=False)"),
        ({"ngram_filter": {}}, "NgramFilter(max_period=13, min_period=1, max_count=32, count_padding=False)"),
        (
            {"ngram_filter": {"min_period": 2, "max_count": 9}},
            "NgramFilter(max_period=13, min_period=2, max_count=9, count_padding=False)",
        ),
        ({"shift_targets": {}}, "ShiftTargets()"),
    ],
)
def test_a_transform_is_a_name_or_a_name_with_options(config, tmp_path, item, expected):
    config["transforms"] = [item]
    for given in (config, write(tmp_path / "a.yaml", config), write(tmp_path / "a.json", config)):
        assert repr(grain_sft.load(given, host=HOST).transforms) == f"({expected},)"


def test_a_batch_may_be_given_in_tokens(config):
    del config["sampler"]["global_batch_size"]
    for tokens, rows in ((6 * LENGTH, 6), (LENGTH, 1)):
        sampler = {**config["sampler"], "global_batch_tokens": tokens}
        assert grain_sft.load({**config, "sampler": sampler}, host=HOST).sampler.global_batch_size == rows


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, "give one of global_batch_size (in rows) and global_batch_tokens"),
        ({"global_batch_size": 6, "global_batch_tokens": 48}, "give one of global_batch_size (in rows)"),
        (
            {"global_batch_tokens": LENGTH - 1},
            "global_batch_tokens is 7, less than one row of layout.sequence_length=8",
        ),
        ({"global_batch_tokens": -8}, "global_batch_tokens is -8, less than one row"),
        (
            {"global_batch_tokens": 6 * LENGTH + 1},
            "global_batch_tokens is 49, which is 6 rows of layout.sequence_length=8 and 1 tokens. Expected whole rows. Give 48 "
            "or 56.",
        ),
        (
            {"global_batch_size": 6, "schedule": [{"step": 3, "global_batch_tokens": 17}]},
            "schedule[0].global_batch_tokens is 17, which is 2 rows of layout.sequence_length=8 and 1 tokens. Expected whole "
            "rows. Give 16 or 24.",
        ),
        ({"global_batch_size": 0}, "global_batch_size is 0; expected an integer (1 or more)"),
    ],
)
def test_a_batch_has_one_size(config, sizes, expected):
    del config["sampler"]["global_batch_size"]
    assert expected in error_of({**config, "sampler": {**config["sampler"], **sizes}})


def test_what_a_config_states_goes_before_what_it_inherits(config, tmp_path):
    write(tmp_path / "configs" / "base.yaml", config)
    write(tmp_path / "configs" / "deep" / "middle.json", {"inherits": "../base.yaml", "sampler": {"seed": 9}})
    top = {"inherits": "deep/middle.json", "layout": {"sequence_length": 4}, "transforms": ["shift_targets"]}
    loaded = grain_sft.load(write(tmp_path / "configs" / "top.yaml", top), host=HOST)
    expected = put(put(put(config, "sampler.seed", 9), "layout.sequence_length", 4), "transforms", ["shift_targets"])
    same_batches(loaded, grain_sft.load(expected, host=HOST))


def test_a_dict_inherits_from_the_working_directory(config, tmp_path, monkeypatch):
    write(tmp_path / "configs" / "base.yaml", config)
    monkeypatch.chdir(tmp_path)
    loaded = grain_sft.load({"inherits": "configs/base.yaml", "sampler": {"seed": 9}}, host=HOST)
    same_batches(loaded, grain_sft.load(put(config, "sampler.seed", 9), host=HOST))


def test_a_batch_in_tokens_replaces_an_inherited_one_in_rows_and_the_other_way_round(config, tmp_path):
    base = str(write(tmp_path / "base.yaml", config))
    tokens = {"inherits": base, "sampler": {"global_batch_tokens": 2 * LENGTH}}
    assert grain_sft.load(tokens, host=HOST).sampler.global_batch_size == 2
    middle = str(write(tmp_path / "middle.yaml", tokens))
    assert (
        grain_sft.load({"inherits": middle, "sampler": {"global_batch_size": 5}}, host=HOST).sampler.rows(0).size == 5
    )


def test_a_parent_is_sought_beside_the_config_and_then_in_the_working_directory(config, tmp_path, monkeypatch):
    """A trainer's configs inherit "configs/base.json" from wherever they are."""
    write(tmp_path / "configs" / "base.json", config)
    top = write(tmp_path / "configs" / "sft" / "top.json", {"inherits": "configs/base.json", "sampler": {"seed": 9}})
    assert f"{tmp_path}/configs/sft/configs/base.json: no such file" in error_of(top)
    monkeypatch.chdir(tmp_path)
    same_batches(grain_sft.load(top, host=HOST), grain_sft.load(put(config, "sampler.seed", 9), host=HOST))
    write(tmp_path / "configs" / "sft" / "configs" / "base.json", put(config, "sampler.global_batch_size", 3))
    assert grain_sft.load(top, host=HOST).sampler.global_batch_size == 3


def test_inheriting_in_a_circle_is_an_error(config, tmp_path):
    write(tmp_path / "self.yaml", {**config, "inherits": "self.yaml"})
    write(tmp_path / "one.yaml", {"inherits": "two.yaml"})
    write(tmp_path / "two.yaml", {"inherits": "./one.yaml"})
    for given in (tmp_path / "self.yaml", tmp_path / "one.yaml", {"inherits": str(tmp_path / "two.yaml")}):
        message = error_of(given)
        assert "inherits itself, by way of" in message and str(tmp_path) in message


def test_inheriting_through_thousands_of_configs_is_an_error(config, tmp_path):
    count = 3000
    write(tmp_path / "0.json", config)
    for number in range(1, count):
        write(tmp_path / f"{number}.json", {"inherits": f"{number - 1}.json"})
    message = error_of(tmp_path / f"{count - 1}.json")
    assert "is inherited through 100 configs" in message and "Join some of them." in message
    assert grain_sft.load(tmp_path / "99.json", host=HOST).sampler.seed == config["sampler"]["seed"]


@pytest.mark.parametrize("parent", [5, ["base.yaml"], True])
def test_what_is_inherited_is_a_path(config, tmp_path, parent):
    path = write(tmp_path / "a.yaml", {**config, "inherits": parent})
    assert f"{path}: inherits is {parent!r}; expected the path of another config" in error_of(path)


def test_a_parent_that_is_not_there_is_named(config, tmp_path):
    path = write(tmp_path / "a.yaml", {**config, "inherits": "none.yaml"})
    assert f"{tmp_path}/none.yaml: no such file" in error_of(path)


@pytest.mark.parametrize(
    ("place", "near"),
    [
        ("smapler", "sampler"),
        ("transform", "transforms"),
        ("corpus.pathremap", "path_remap"),
        ("corpus.eos_id", "eos_token_id"),
        ("corpus.d_type", "dtype"),
        ("layout.sequence_len", "sequence_length"),
        ("sampler.sed", "seed"),
        ("sampler.global_batch", "global_batch_size"),
        ("sampler.epoch", "epochs"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_that_there_is(config, tmp_path, place, near):
    path = write(tmp_path / "a.yaml", put(config, place, 1))
    message = error_of(path)
    *section, key = place.split(".")
    where = f"{path}: {section[0]}" if section else str(path)
    assert message == f"{where}: unknown key {key!r}. The nearest known: {near!r}."


@pytest.mark.parametrize(
    ("name", "text", "line", "key"),
    [
        ("a.json", '{"corpus": {"path": "a"},\n "layout": {},\n "corpus": {}}', 3, "corpus"),
        ("a.json", '{"sampler": {"seed": 1, "path": "{\\"seed\\": 2",\n\n "seed" : 2}}', 3, "seed"),
        ("a.json", '{"transforms": [{"x": 1}, {"x": 1,\n "y": [[]],\n "\\u0078": 1}]}', 3, "x"),
        ("a.yaml", "corpus: {path: a}\nlayout: {}\ncorpus: {}\n", 3, "corpus"),
        ("a.yaml", "sampler:\n  seed: 1\n  order: olmo\n  seed: 2\nsampler: {}\n", 4, "seed"),
        ("a.yaml", "transforms:\n- ngram_filter:\n    max_count: 1\n    'max_count': 2\n", 4, "max_count"),
    ],
)
def test_a_key_that_stands_twice_is_an_error_with_its_line(tmp_path, name, text, line, key):
    path = tmp_path / name
    path.write_text(text)
    assert error_of(path) == f"{path}: line {line}: the key {key!r} is given a second time. Remove one of the two."


def test_one_key_in_two_sections_and_yamls_anchors_are_fine(config, tmp_path):
    text = yaml.safe_dump({key: value for key, value in config.items() if key != "sampler"})
    path = tmp_path / "a.yaml"
    path.write_text(text + "sampler: &kept {order: shuffle, seed: 3, global_batch_size: 6, epochs: 2}\n")
    same_batches(grain_sft.load(path, host=HOST), grain_sft.load(config, host=HOST))
    path.write_text(text + "sampler: {seed: &seed 3, global_batch_size: 6, epochs: *seed}\n")
    assert grain_sft.load(path, host=HOST).sampler.epochs == 3


@pytest.mark.parametrize(
    ("place", "value", "kind"),
    [
        ("corpus.path", "none.npy", CorpusFileError),
        ("corpus.dtype", "int32", ConfigError),
        ("layout.sequence_length", 10_000, LayoutError),
        ("sampler.seed", -1, ConfigError),
        ("transforms", [{"ngram_filter": {"max_period": 0}}], TransformError),
    ],
)
def test_an_error_behind_a_config_names_it_and_stays_of_its_kind(config, tmp_path, place, value, kind):
    path = write(tmp_path / "a.yaml", put(config, place, value))
    with pytest.raises(kind) as error:
        grain_sft.load(path, host=HOST)
    assert str(error.value).startswith(f"{path}: ") and type(error.value) is kind
    assert error_of(put(config, place, value)).startswith("config: ")


def test_an_audit_log_is_written_where_the_config_says(config, tmp_path):
    config["audit"] = str(tmp_path / "logs" / "audit")
    (tmp_path / "logs").mkdir()
    iterator = grain_sft.load(config, host=HOST).iter()
    next(iterator)
    iterator.close()
    assert "action=dataset_load" in (tmp_path / "logs" / "audit.log").read_text()
    assert error_of({**config, "audit": 5}) == "config: audit is 5; expected text."


@pytest.mark.parametrize("key", [5, None, True, 1.5])
def test_a_key_of_yaml_that_is_no_text_is_an_unknown_one(config, tmp_path, key):
    path = write(tmp_path / "a.yaml", {**config, key: 1})
    assert f"{path}: unknown key {key!r}" in error_of(path)


@pytest.mark.parametrize("section", ["one corpus", "a source of a mixture"])
def test_how_remote_files_are_read_is_given_to_the_corpus_and_changes_no_receipt(config, tmp_path, section):
    remote = {"seconds": 7, "requests": 3, "cache": {"folder": str(tmp_path / "kept"), "max_bytes": "1GiB"}}
    plain, corpus = copy.deepcopy(config), config["corpus"]
    if section != "one corpus":
        for each in (config, plain):
            each["corpus"] = {"mixture": {"one": {**each["corpus"], "weight": 1}}}
            del each["sampler"]["epochs"]
        corpus = config["corpus"]["mixture"]["one"]
    corpus["remote"] = remote
    pipeline = grain_sft.load(config, host=HOST)
    source = pipeline.source if section == "one corpus" else pipeline.source.sources["one"]
    options = source.layout.corpus.remote
    assert (options.limits.seconds, options.limits.requests) == (7, 3)
    assert (options.cache.folder, options.cache.max_bytes) == (str(tmp_path / "kept"), 1 << 30)
    assert pipeline.receipt == grain_sft.load(plain, host=HOST).receipt


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ({"second": 7}, "corpus.remote: unknown key 'second'"),
        ({"cache": {"folder": "kept"}}, "corpus.remote.cache lacks the key 'max_bytes'"),
        ("fast", "corpus.remote"),
    ],
)
def test_a_mistake_in_how_remote_files_are_read_is_a_config_error(config, remote, expected):
    config["corpus"]["remote"] = remote
    with pytest.raises(ConfigError, match=re.escape(expected)):
        grain_sft.load(config, host=HOST)


def test_files_outside_of_the_root_of_a_config_are_refused(config, data, tmp_path):
    config["corpus"]["path"] = "data/mix.txt"
    config["corpus"]["root"] = "data"
    path = write(tmp_path / "run.yaml", config)
    assert len(grain_sft.load(path, host=HOST).source) == ROWS
    config["corpus"]["root"] = str(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(CorpusError, match="elsewhere"):
        grain_sft.load(write(tmp_path / "run.yaml", config), host=HOST)


@pytest.mark.parametrize("section", ["corpus", "layout", "sampler"])
def test_every_section_is_needed(config, tmp_path, section):
    for value in ("absent", None, [], "text"):
        changed = {key: stated for key, stated in config.items() if key != section}
        if value != "absent":
            changed[section] = value
        path = write(tmp_path / "a.yaml", changed)
        message = error_of(path)
        assert f"{path}: {section} is {None if value == 'absent' else value!r}; expected a section with" in message


@pytest.mark.parametrize("place", ["corpus.path", "layout.kind", "layout.sequence_length", "sampler.seed"])
def test_every_required_key_is_needed(config, tmp_path, place):
    section, key = place.split(".")
    del config[section][key]
    path = write(tmp_path / "a.yaml", config)
    assert error_of(path) == f"{path}: {section} lacks the key {key!r}."


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("corpus.path", 5, "text or a list"),
        ("corpus.path", [5], "text"),
        ("corpus.eos_token_id", "5", "an integer"),
        ("corpus.eos_token_id", 5.0, "an integer"),
        ("corpus.path_remap", "a=b", "a mapping"),
        ("corpus.path_remap", {"a": 5}, "text"),
        ("layout.sequence_length", "8", "an integer"),
        ("sampler.seed", True, "an integer"),
        ("sampler.global_batch_size", 6.0, "an integer"),
        ("sampler.shuffle", 1, "true or false"),
    ],
)
def test_a_value_of_the_wrong_kind_is_an_error(config, tmp_path, place, value, expected):
    path = write(tmp_path / "a.yaml", put(config, place, value))
    message = error_of(path)
    assert message.startswith(f"{path}: {place}") and f"expected {expected}" in message
    assert repr(value) in message or repr(5) in message or "['a.npy']" in message


@pytest.mark.parametrize(
    ("place", "value", "among"),
    [
        ("layout.kind", "window", "windows"),
        ("layout.kind", 5, "windows"),
        ("sampler.last_batch", "keep", "drop, fill, run_on"),
    ],
)
def test_a_word_that_is_not_one_of_those_is_an_error_that_lists_them(config, tmp_path, place, value, among):
    path = write(tmp_path / "a.yaml", put(config, place, value))
    message = error_of(path)
    assert message.startswith(f"{path}: {place} is {value!r}; expected one of ") and among in message


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ("shift_targets", "transforms is 'shift_targets'; expected a list"),
        ({"shift_targets": {}}, "expected a list"),
        (None, "transforms is None; expected a list"),
        (["ngram_filtre"], "transforms is 'ngram_filtre'; expected one of ngram_filter,"),
        ([{"shift_target": {}}], "package.module:Name. The nearest known: 'shift_targets'"),
        ([5], "transforms: 5; expected a name, or one name with its options"),
        ([{"ngram_filter": {}, "shift_targets": {}}], "expected a name, or one name with its options"),
        ([{"ngram_filter": [1]}], "expected a name, or one name with its options"),
        (
            [{"ngram_filter": {"maxperiod": 5}}],
            "transforms.ngram_filter: unknown key 'maxperiod'. The nearest known: 'max_period'",
        ),
        ([{"ngram_filter": {"max_period": "5"}}], "transforms.ngram_filter.max_period is '5'; expected an integer"),
        (
            [{"ngram_filter": {"count_padding": 1}}],
            "transforms.ngram_filter.count_padding is 1; expected true or false",
        ),
        ([{"ngram_filter": {"max_period": True}}], "transforms.ngram_filter.max_period is True; expected an integer"),
        ([{"shift_targets": {"by": 1}}], "transforms.shift_targets: unknown key 'by'. It takes none."),
    ],
)
def test_a_wrong_transform_is_an_error(config, tmp_path, transforms, expected):
    path = write(tmp_path / "a.yaml", {**config, "transforms": transforms})
    message = error_of(path)
    assert message.startswith(f"{path}: ") and expected in message


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("layout.sequence_length", 0, "sequence_length=0: expected an integer, 1 or more"),
        ("layout.sequence_length", 10_000, "leaves no row"),
        ("corpus.dtype", "int32", "uint32"),
        ("corpus.path", "none.txt", "none.txt"),
        ("corpus.path", [], "empty list of files"),
        ("sampler.global_batch_size", 100, "global_batch_size=100 is more than"),
        ("sampler.seed", -1, "seed is -1; expected an integer (0 or more)"),
        ("transforms", [{"ngram_filter": {"max_period": 0}}], "max_period=0: expected an integer, 1 or more"),
    ],
)
def test_what_a_config_describes_wrongly_is_an_error_too(config, place, value, expected):
    assert expected in error_of(put(config, place, value))


@pytest.mark.parametrize(
    ("where", "patterns"),
    [
        ("a.npy", ["a.npy"]),
        (["b.npy", "a.npy"], ["b.npy", "a.npy"]),
        ("*.npy", ["a.npy", "b.npy"]),
        (".", ["a.npy", "b.npy"]),
    ],
    ids=["file", "list", "glob", "directory"],
)
def test_relative_token_paths_start_at_the_configs_folder_or_at_the_working_directory(
    config, data, monkeypatch, tmp_path, where, patterns
):
    path = write(data / "a.yaml", put(config, "corpus.path", where))
    expected = [os.path.realpath(data / name) for name in patterns]
    (tmp_path / "empty").mkdir()
    for folder in (data, tmp_path / "empty") if where != "." else (data,):
        monkeypatch.chdir(folder)
        found = grain_sft.load(path, host=HOST).source.layout.corpus.shards
        assert [os.path.realpath(shard.path) for shard in found] == expected


def test_the_configs_folder_goes_before_the_working_directory(config, data, write_tokens, tmp_path, monkeypatch):
    for where in ("a.npy", "*.npy"):
        path = write(data / "a.yaml", put(config, "corpus.path", where))
        here = write_tokens("here/a.npy", range(100), "uint16")
        monkeypatch.chdir(tmp_path / "here")
        shard = grain_sft.load(path, host=HOST).source.layout.corpus.shards[0]
        assert os.path.realpath(shard.path) == os.path.realpath(data / "a.npy")
    nowhere = write(tmp_path / "elsewhere" / "a.yaml", put(config, "corpus.path", "a.npy"))
    (shard,) = grain_sft.load(nowhere, host=HOST).source.layout.corpus.shards
    assert os.path.realpath(shard.path) == os.path.realpath(here)


def test_a_relative_path_that_is_nowhere_is_named(config, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for where in ("none.txt", "none/*.npy"):
        assert where in error_of(write(data / "a.yaml", put(config, "corpus.path", where)))


@pytest.fixture
def chats(config, tmp_path):
    """The config of 40 short documents, packed."""
    write_olmo(tmp_path / "chats", documents(40))
    corpus = {"path": str(tmp_path / "chats"), "format": "olmo", "eos_token_id": EOS}
    layout = {"kind": "packed", "sequence_length": 32}
    sampler = {"order": "olmo", "seed": 3, "global_batch_size": 4, "epochs": 2}
    return {**config, "corpus": corpus, "layout": layout, "sampler": sampler}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (PaddedLayout, {}),
        (PaddedLayout, {"keep": "first", "min_tokens": 5}),
        (PackedLayout, {}),
        (PackedLayout, {"algorithm": "first_fit_decreasing", "long_documents": "fragment", "source_group_size": 2}),
        (
            PackedLayout,
            {"ties": "numpy", "max_segments": 3, "boundaries": "eos", "bos_token_id": None, "batch_rows": 1},
        ),
        (PackedLayout, {"algorithm": "concat_then_split", "max_segments": None}),
        (PackedLayout, {"seed": 5, "epochs": 1}),
    ],
)
def test_a_layout_of_documents_takes_the_options_of_its_class(chats, make, options):
    kind = {PaddedLayout: "padded", PackedLayout: "packed"}[make]
    loaded = grain_sft.load({**chats, "layout": {"kind": kind, "sequence_length": 32, **options}}, host=HOST)
    corpus = grain_sft.open_corpus(chats["corpus"]["path"], eos_token_id=EOS)
    source = grain_sft.NpyDataSource(make(corpus, 32, **options))
    sampler = grain_sft.IndexSampler(len(source), global_batch_size=4, seed=3, epochs=2, order="olmo")
    same_batches(loaded, grain_sft.Pipeline(source, sampler, loaded.transforms))


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("layout.algoritm", "multipack", "layout: unknown key 'algoritm'. The nearest known: 'algorithm'."),
        ("layout.algorithm", "best_fit", "expected one of best_fit_decreasing, "),
        ("layout.long_documents", "split", "expected one of truncate, fragment."),
        ("layout.ties", "heap", "expected one of stable, numpy"),
        ("layout.boundaries", "end", "expected one of auto, eos"),
        ("layout.max_segments", "3", "layout.max_segments is '3'; expected an integer"),
        ("layout.bos_token_id", 1.0, "layout.bos_token_id is 1.0; expected an integer"),
        ("layout.source_group_size", None, "layout.source_group_size is None; expected an integer"),
        ("layout.max_segments", 0, "max_segments is 0; expected an integer (1 or more)"),
        ("layout.epochs", 2, "epochs=2: algorithm best_fit_decreasing packs every epoch the same"),
        (
            "layout.keep",
            "last",
            "layout.keep is an option of kind padded; kind packed takes sequence_length, algorithm,",
        ),
        ("layout.min_tokens", 2, "Take it out, or write kind: padded."),
        (
            "layout.algorithm",
            "multipack",
            "layout lacks the key 'seed': algorithm multipack packs each epoch anew by it.",
        ),
    ],
)
def test_a_mistake_in_a_layout_of_documents_has_its_sentence(chats, place, value, expected):
    assert expected in error_of(put(chats, place, value))


def test_an_option_of_another_kind_is_an_error_also_in_windows(config):
    message = error_of(put(config, "layout.ties", "stable"))
    assert message.endswith("kind windows takes sequence_length. Take it out, or write kind: packed.")


def test_multipack_makes_the_batches_that_the_sampler_reads(chats):
    layout = {**chats["layout"], "algorithm": "multipack", "seed": 7, "epochs": 2}
    sampler = {"order": "sequential", "seed": 0, "global_batch_size": 3, "epochs": 1}
    config = {**chats, "layout": layout, "sampler": sampler}
    loaded = grain_sft.load(config, host=HOST)
    assert loaded.source.layout.packing.batch_rows == 3 and len(loaded) * 3 == len(loaded.source)
    same_batches(loaded, grain_sft.load(put(config, "layout.batch_rows", 3), host=HOST))
    tokens = {key: value for key, value in sampler.items() if key != "global_batch_size"} | {"global_batch_tokens": 96}
    same_batches(loaded, grain_sft.load({**config, "sampler": tokens}, host=HOST))
    for place, value, expected in (
        ("layout.batch_rows", 4, "layout.batch_rows is 4, but the sampler's global batch has 3 rows"),
        ("sampler.order", "shuffle", "sampler.order is 'shuffle'; with layout.algorithm multipack"),
        ("sampler.epochs", 2, "sampler.epochs is 2; with layout.algorithm multipack"),
    ):
        assert expected in error_of(put(config, place, value))


def test_order_openchat_with_multipack_is_openchats_run(chats):
    layout = {**chats["layout"], "algorithm": "multipack"}
    config = {**chats, "layout": layout}
    config["sampler"] = {"order": "openchat", "seed": 7, "global_batch_size": 3, "epochs": 2}
    loaded = grain_sft.load(config, host=HOST)
    stated = {**config, "layout": {**layout, "seed": 7, "epochs": 2}}
    stated["sampler"] = {"order": "sequential", "seed": 7, "global_batch_size": 3, "epochs": 1}
    same_batches(loaded, grain_sft.load(stated, host=HOST))
    for place, value, expected in (
        ("layout.seed", 8, "layout.seed is 8, but sampler.seed is 7. Leave one out."),
        ("layout.epochs", 3, "layout.epochs is 3, but sampler.epochs is 2. Leave one out."),
        (
            "sampler.last_batch",
            "run_on",
            "sampler.last_batch is 'run_on'; layout.algorithm multipack takes",
        ),
        ("sampler.shuffle", False, "sampler.shuffle is False; layout.algorithm multipack takes"),
    ):
        assert expected in error_of(put(config, place, value))
    del config["sampler"]["epochs"]
    assert "sampler lacks the key 'epochs': layout.algorithm multipack makes the rows of each epoch" in error_of(config)


def test_a_corpus_may_be_padded_with_another_token_and_lose_its_mask(chats):
    known = grain_sft.load({**chats, "layout": {"kind": "padded", "sequence_length": 32}}, host=HOST)
    tokens = known.source.read(range(40))["tokens"]
    padding = known.source.read(range(40))["segment_ids"] == 0
    assert padding.any() and (tokens[padding] == EOS).all()
    config = {**chats, "layout": {"kind": "padded", "sequence_length": 32}}
    other = grain_sft.load(put(config, "corpus.pad_token_id", 77), host=HOST).source.read(range(40))
    assert (other["tokens"][padding] == 77).all() and (other["tokens"][~padding] == tokens[~padding]).all()
    eos = grain_sft.load(put(config, "corpus.pad_token_id", None), host=HOST).source.read(range(40))
    np.testing.assert_array_equal(eos["tokens"], tokens)
    unmasked = grain_sft.load(put(config, "corpus.use_loss_mask", False), host=HOST)
    np.testing.assert_array_equal(unmasked.source.read(range(40))["loss_mask"], ~padding)
    assert unmasked.data_key != known.data_key
    assert "corpus.pad_token_id is 'x'; expected an integer" in error_of(put(config, "corpus.pad_token_id", "x"))
    assert "corpus.use_loss_mask is 0; expected true or false" in error_of(put(config, "corpus.use_loss_mask", 0))


def test_without_an_eos_no_padding_is_made_of_it(config):
    del config["corpus"]["eos_token_id"]
    message = error_of(put(config, "corpus.pad_token_id", None))
    assert "corpus.pad_token_id is null, which is the id of the token that ends a document, and the corpus" in message


def test_another_kind_of_layout_replaces_the_options_of_the_inherited_one(chats, tmp_path):
    base = write(tmp_path / "base.yaml", put(chats, "layout.ties", "numpy"))
    loaded = grain_sft.load({"inherits": str(base), "layout": {"kind": "padded", "keep": "first"}}, host=HOST)
    assert repr(loaded.source.layout).startswith("PaddedLayout(sequence_length=32, keep='first'")
    loaded = grain_sft.load({"inherits": str(base), "layout": {"kind": "packed", "max_segments": 2}}, host=HOST)
    assert loaded.source.layout.packing.ties == "numpy"


@pytest.mark.parametrize("text", ["", "{", "corpus: {path: a", "{'corpus': 1}", '{"a": 1,}', "[" * 100_000])
def test_what_is_no_json_is_an_error(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    message = error_of(path)
    assert message.startswith(f"{path}: not JSON: ") and "A YAML config is named .yaml" in message


@pytest.mark.parametrize(
    "text",
    [
        "corpus: {path: a",
        "a: b: c",
        "\t- x",
        "corpus: *nothing",
        "corpus: !!python/object:os.system {}",
        "a: 2024-13-45",
        "a: !!int x",
        "a: !!bool x",
        "a: !!timestamp x",
        "a: !!binary ä",
        "{[1]: 2}",
        "\0",
        "[" * 2_000,
    ],
)
def test_what_is_no_yaml_is_an_error(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert error_of(path).startswith(f"{path}: not YAML: ")


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("5", "int"), ("null", "NoneType"), ('"corpus"', "str")])
def test_what_is_no_mapping_is_an_error(tmp_path, text, kind):
    for name in ("a.json", "a.yaml"):
        (tmp_path / name).write_text(text)
        message = error_of(tmp_path / name)
        assert message == f"{tmp_path / name}: expected sections corpus, layout, sampler; found a {kind}."


def test_an_empty_yaml_file_is_no_mapping(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert "expected sections corpus, layout, sampler; found a NoneType" in error_of(tmp_path / "a.yaml")


def test_an_empty_config_lacks_its_first_section():
    assert "config: corpus is None; expected a section with path" in error_of({})


def test_a_config_that_cant_be_read_is_named(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    (tmp_path / "folder.yaml").mkdir()
    for name, expected in (
        ("none.yaml", "no such file"),
        ("none.json", "no such file"),
        ("folder.yaml", "can't be read"),
        ("latin.yaml", "byte 3 is not UTF-8"),
    ):
        message = error_of(tmp_path / name)
        assert f"{tmp_path / name}" in message and expected in message


def test_yaml_runs_nothing(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"corpus: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'touched'}]")
    error_of(path)
    assert not Path(tmp_path / "touched").exists()


def test_mistakes_of_a_config_are_config_errors(config):
    for changed in (put(config, "layout.kind", "x"), put(config, "x", 1), put(config, "corpus.path", [5])):
        with pytest.raises(ConfigError):
            grain_sft.load(changed, host=HOST)
