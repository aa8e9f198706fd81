"""`load` makes the pipeline that direct calls make, with the same corpus, layout, source and sampler."""

import copy
import os

import fsspec
import numpy as np
import pytest
import yaml
from batches import assert_same, error_of, load, put, write_config
from sft_files import EOS

import grain_sft
from grain_sft import NgramFilter, ShiftTargets
from grain_sft.config import read_config
from grain_sft.config.reading import read


def same_batches(one, other):
    assert repr(one) == repr(other) and len(one) == len(other)
    for step in range(len(one)):
        assert_same(one[step], other[step])


def test_a_config_makes_the_pipeline_that_it_states(config, data):
    corpus = grain_sft.open_corpus(data / "mix.txt", dtype="uint16", eos_token_id=5)
    source = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 8))
    sampler = grain_sft.IndexSampler(30, global_batch_size=6, seed=3, epochs=2)
    transforms = [NgramFilter(max_period=5, max_count=3), ShiftTargets()]
    same_batches(load(config), grain_sft.Pipeline(source, sampler, transforms))
    assert len(load(config)) == 10 and "host is 0 (int); expected Host" in error_of(config, host=0)


def test_a_dict_and_its_json_and_yaml_are_one_config_and_the_dict_is_left_as_it_was(config, tmp_path, data):
    (tmp_path / "configs" / "a").mkdir(parents=True)  # a tokenizer next to the configs, named as in the mix
    (data / "mix.txt").write_text("web,{TOKENIZER}.npy\ncode,b.npy\n")
    config["corpus"]["tokenizer"] = "a"
    for name in ("a.json", "a.yaml", "a.yml"):
        path = write_config(tmp_path / "configs" / name, config)
        same_batches(load(read_config(path)[1]), load(config))
        same_batches(load(str(path)), load(config))
    for given in (config, {"inherits": str(path), "sampler": {"global_batch_tokens": 16}}):
        before = copy.deepcopy(given)
        load(given)
        assert given == before


def test_yamls_anchors_and_a_null_mixture_or_tokenizer_are_accepted(config, tmp_path):
    for key in ("mixture", "tokenizer"):
        same_batches(load(put(config, f"corpus.{key}", None)), load(config))
    text = yaml.safe_dump({key: value for key, value in config.items() if key != "sampler"})
    path = tmp_path / "a.yaml"
    path.write_text(text + "sampler: &kept {order: shuffle, seed: 3, global_batch_size: 6, epochs: 2}\n")
    same_batches(load(path), load(config))
    path.write_text(text + "sampler: {seed: &seed 3, global_batch_size: 6, epochs: *seed}\n")
    assert load(path).sampler.epochs == 3


def test_a_transform_is_a_name_or_a_name_with_options_and_targets_are_shifted_by_default(config):
    for stated, expected in (
        ([], ()),
        (["ngram_filter", {"shift_targets": {}}], (NgramFilter(), ShiftTargets())),
        ([{"ngram_filter": None}], (NgramFilter(),)),
        ([{"ngram_filter": {"min_period": 2}}], (NgramFilter(min_period=2),)),
    ):
        assert repr(load(config | {"transforms": stated}).transforms) == repr(expected), stated
    del config["transforms"]
    assert repr(load(config).transforms) == repr((ShiftTargets(),))


@pytest.mark.parametrize("section", ["one corpus", "a source of a mixture"])
def test_options_of_remote_files_reach_the_corpus_and_do_not_change_the_receipt(config, tmp_path, section):
    if section != "one corpus":
        config["corpus"] = {"mixture": {"one": {**config["corpus"], "weight": 1}}}
        del config["sampler"]["epochs"]
    plain = copy.deepcopy(config)
    corpus = config["corpus"] if section == "one corpus" else config["corpus"]["mixture"]["one"]
    cache = {"folder": str(tmp_path / "kept"), "max_bytes": "1GiB"}
    corpus["remote"] = {"seconds": 7, "requests": 3, "cache": cache}
    pipeline = load(config)
    source = pipeline.source if section == "one corpus" else pipeline.source.sources["one"]
    options = source.layout.corpus.remote
    assert (options.seconds, options.requests) == (7, 3)
    assert (options.cache.folder, options.cache.max_bytes) == (cache["folder"], 1 << 30)
    assert pipeline.receipt == load(plain).receipt


def test_files_outside_of_the_root_of_a_config_are_refused(config, data, tmp_path):
    config["corpus"] |= {"path": "data/mix.txt", "root": "data"}
    assert len(load(write_config(tmp_path / "run.yaml", config)).source) == 30
    config["corpus"]["root"] = str(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    assert "elsewhere" in error_of(write_config(tmp_path / "run.yaml", config))


def test_keys_replace_inherited_keys_from_a_file_in_the_configs_or_the_working_directory(config, tmp_path, monkeypatch):
    configs = tmp_path / "configs"
    write_config(configs / "base.yaml", config)
    write_config(configs / "deep" / "middle.json", {"inherits": "../base.yaml", "sampler": {"seed": 9}})
    top = {"inherits": "deep/middle.json", "layout": {"sequence_length": 4}, "transforms": ["shift_targets"]}
    seeded = put(config, "sampler.seed", 9)
    expected = put(put(seeded, "layout.sequence_length", 4), "transforms", ["shift_targets"])
    same_batches(load(write_config(configs / "top.yaml", top)), load(expected))
    monkeypatch.chdir(tmp_path)  # a dict inherits from here; a file first looks in its own folder
    dict_of_top = {"inherits": "configs/base.yaml", "sampler": {"seed": 9}}
    same_batches(load(dict_of_top), load(seeded))
    in_deep = write_config(configs / "deep" / "top.json", dict_of_top)
    same_batches(load(in_deep), load(seeded))
    write_config(configs / "deep" / "configs" / "base.yaml", put(config, "sampler.global_batch_size", 3))
    assert load(in_deep).sampler.global_batch_size == 3


def test_relative_paths_of_a_config_in_a_bucket_may_lead_upwards():
    bucket = fsspec.filesystem("memory")
    bucket.pipe("/leads-upwards/base.json", b'{"corpus": {"path": "./data/a.npy"}, "sampler": {"seed": 3}}')
    bucket.pipe("/leads-upwards/runs/run.json", b'{"inherits": "../base.json", "sampler": {"seed": 4}}')
    found = read("memory://leads-upwards/runs/run.json", [])
    assert found == {"corpus": {"path": "memory://leads-upwards/data/a.npy"}, "sampler": {"seed": 4}}


def test_a_batch_in_tokens_replaces_an_inherited_one_in_rows_and_the_other_way_round(config, tmp_path):
    tokens = {"inherits": str(write_config(tmp_path / "base.yaml", config)), "sampler": {"global_batch_tokens": 16}}
    assert load(tokens).sampler.global_batch_size == 2
    middle = str(write_config(tmp_path / "middle.yaml", tokens))
    assert load({"inherits": middle, "sampler": {"global_batch_size": 5}}).sampler.rows(0).size == 5


def test_null_removes_an_inherited_schedule_on_exhausted_or_transforms(config, tmp_path):
    changed = put(put(config, "sampler.schedule", [{"step": 1, "global_batch_size": 6}]), "sampler.on_exhausted", "stop")
    base = str(write_config(tmp_path / "base.yaml", put(changed, "transforms", ["drop_last_position"])))
    heir = {"inherits": base, "sampler": {"schedule": None, "on_exhausted": None}, "transforms": None}
    same_batches(load(heir), load(put(put(config, "transforms", ["shift_targets"]), "sampler.schedule", [])))


def test_the_mixture_of_a_source_replaces_its_inherited_path_and_the_other_way_round(config, data, tmp_path):
    path = str(data / "a.npy")
    outer, inner = {"weight": 1, "path": path}, {"mixture": {"path": {"weight": 1, "path": path}}}
    mixture = {"path": outer, "web": outer}
    del config["corpus"]["path"], config["sampler"]["epochs"]
    base = str(write_config(tmp_path / "base.yaml", put(config, "corpus.mixture", mixture)))
    middle = {"inherits": base, "corpus": {"mixture": {"web": inner, "mixture": outer}}}
    assert [*load(middle).source.sources] == ["path", "web/path", "mixture"]
    middle = str(write_config(tmp_path / "middle.yaml", middle))
    again = load({"inherits": middle, "corpus": {"mixture": {"web": {"path": path}}}})
    assert again.receipt == load({"inherits": base, "corpus": {"mixture": {"mixture": outer}}}).receipt


def test_a_batch_in_tokens_is_whole_rows(config):
    del config["sampler"]["global_batch_size"]
    for tokens, rows in ((48, 6), (8, 1)):
        assert load(put(config, "sampler.global_batch_tokens", tokens)).sampler.global_batch_size == rows
    whole_rows = "which is 6 rows of layout.sequence_length=8 and 1 tokens. Expected whole rows. Give 48 or 56."
    for tokens, expected in ((7, "less than one row of"), (-8, "less than one row of"), (49, whole_rows)):
        message = error_of(put(config, "sampler.global_batch_tokens", tokens))
        assert f"global_batch_tokens is {tokens}, {expected}" in message
    config = put(put(config, "sampler.global_batch_tokens", 8), "layout.sequence_length", 0)
    assert "layout.sequence_length is 0; expected an integer (1 or more)" in error_of(config)


def test_another_kind_of_layout_replaces_the_options_of_the_inherited_one(chats, tmp_path):
    base = str(write_config(tmp_path / "base.yaml", put(chats, "layout.ties", "numpy")))
    loaded = load({"inherits": base, "layout": {"kind": "padded", "keep": "first"}})
    assert repr(loaded.source.layout).startswith("PaddedLayout(sequence_length=32, keep='first'")
    loaded = load({"inherits": base, "layout": {"kind": "packed", "max_segments": 2}})
    assert loaded.source.layout.packing.ties == "numpy"
    mixture = {"a": {"weight": 1, "path": chats["corpus"].pop("path"), "layout": {"max_segments": 2}}}
    del chats["sampler"]["epochs"]
    base = str(write_config(tmp_path / "mixed.yaml", put(chats, "corpus.mixture", mixture)))
    loaded = load({"inherits": base, "corpus": {"mixture": {"a": {"layout": {"kind": "packed", "ties": "numpy"}}}}})
    assert loaded.source.sources["a"].layout.packing.max_segments == 2


def test_inheriting_in_a_circle_or_through_hundreds_of_configs_is_an_error(config, tmp_path):
    write_config(tmp_path / "self.yaml", {**config, "inherits": "self.yaml"})
    write_config(tmp_path / "one.yaml", {"inherits": "two.yaml"})
    write_config(tmp_path / "two.yaml", {"inherits": "./one.yaml"})
    write_config(tmp_path / "outside.yaml", {"inherits": "one.yaml"})
    one, two, itself = (str(tmp_path / f"{name}.yaml") for name in ("one", "two", "self"))
    assert error_of(itself).startswith(f"{itself}: inherits itself: {itself} -> {itself}. Remove")
    for given in (one, tmp_path / "outside.yaml"):
        assert f"{one}: inherits itself: {one} -> {two} -> {one}. Remove" in error_of(given), given
    assert f"{two}: inherits itself: {two} -> {one} -> {two}. Remove" in error_of({"inherits": two})
    write_config(tmp_path / "0.json", config)
    for number in range(1, 300):
        write_config(tmp_path / f"{number}.json", {"inherits": f"{number - 1}.json"})
    message = error_of(tmp_path / "299.json")
    assert "is inherited through 100 configs" in message and "Join some of them." in message
    assert load(tmp_path / "99.json").sampler.seed == config["sampler"]["seed"]


@pytest.mark.parametrize(
    ("where", "names"),
    [("a.npy", "a"), (["b.npy", "a.npy"], "ba"), ("*.npy", "ab"), (".", "ab")],
    ids=["file", "list", "glob", "directory"],
)
def test_relative_token_paths_start_at_the_configs_folder_and_then_at_the_working_directory(
    config, data, write_tokens, monkeypatch, tmp_path, where, names
):
    write_tokens("here/a.npy", range(100), "uint16")
    monkeypatch.chdir(tmp_path / "here")

    def paths(folder):
        shards = load(write_config(folder / "a.yaml", put(config, "corpus.path", where))).source.layout.corpus.shards
        return [os.path.realpath(shard.path) for shard in shards]

    assert paths(data) == [os.path.realpath(data / f"{name}.npy") for name in names]
    if where == "a.npy":
        assert paths(tmp_path / "elsewhere") == [os.path.realpath("a.npy")]


def test_multipack_makes_the_batches_that_the_sampler_reads(chats):
    layout = {**chats["layout"], "algorithm": "multipack", "seed": 7, "epochs": 2}
    sampler = {"order": "sequential", "seed": 0, "epochs": 1}
    config = {**chats, "layout": layout, "sampler": {**sampler, "global_batch_size": 3}}
    loaded = load(config)
    assert loaded.source.layout.packing.batch_rows == 3 and len(loaded) * 3 == len(loaded.source)
    same_batches(loaded, load(put(config, "layout.batch_rows", 3)))
    same_batches(loaded, load({**config, "sampler": {**sampler, "global_batch_tokens": 96}}))
    for place, value, expected in (
        ("layout.batch_rows", 4, "layout.batch_rows is 4, but the sampler's global batch has 3 rows"),
        ("sampler.order", "shuffle", "sampler.order is 'shuffle'; expected 'sequential', because layout.algorithm"),
        ("sampler.epochs", 2, "sampler.epochs is 2; expected 1, because layout.algorithm multipack"),
        ("sampler.schedule", [{"step": 1, "global_batch_size": 6}], "makes whole batches of one size beforehand"),
    ):
        assert expected in error_of(put(config, place, value))


def test_order_openchat_gives_multipack_the_seed_and_the_epochs_of_the_sampler(chats):
    config = put(chats, "layout.algorithm", "multipack")
    config["sampler"] = {"order": "openchat", "seed": 7, "global_batch_size": 3, "epochs": 2}
    stated = {**config, "layout": {**config["layout"], "seed": 7, "epochs": 2}}
    stated["sampler"] = {"order": "sequential", "seed": 7, "global_batch_size": 3, "epochs": 1}
    same_batches(load(config), load(stated))
    for place, value, expected in (
        ("layout.seed", 8, "layout.seed is 8, but sampler.seed is 7. Leave one of them out."),
        ("layout.epochs", 3, "layout.epochs is 3, but sampler.epochs is 2. Leave one of them out."),
        ("sampler.last_batch", "run_on", "sampler.last_batch is 'run_on'; expected 'drop', because layout.algorithm"),
        ("sampler.shuffle", False, "sampler.shuffle is False; expected True, because layout.algorithm multipack"),
    ):
        assert expected in error_of(put(config, place, value))
    del config["sampler"]["epochs"]
    for epochs in ({}, {"epochs": None}):
        config["sampler"] |= epochs
        assert "sampler.epochs is missing or null: layout.algorithm multipack makes the rows" in error_of(config)


def test_a_corpus_may_be_padded_with_another_token_and_lose_its_mask(chats):
    config = put(chats, "layout.kind", "padded")
    whole = load(config)
    rows = whole.source.read(range(40))
    tokens, padding = rows["tokens"], rows["segment_ids"] == 0
    assert padding.any() and (tokens[padding] == EOS).all()
    other = load(put(config, "corpus.pad_token_id", 77)).source.read(range(40))["tokens"]
    np.testing.assert_array_equal(other, np.where(padding, 77, tokens))
    eos = load(put(config, "corpus.pad_token_id", None)).source.read(range(40))
    np.testing.assert_array_equal(eos["tokens"], tokens)
    unmasked = load(put(config, "corpus.use_loss_mask", False))
    np.testing.assert_array_equal(unmasked.source.read(range(40))["loss_mask"], ~padding)
    assert unmasked.data_key != whole.data_key
