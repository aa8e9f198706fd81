"""`load`: a config is the five nouns as they are, and each of its mistakes has a sentence."""

import copy
import json
import os
from pathlib import Path

import numpy as np
import pytest
from batches import assert_same, error_of, load, put
from sft_files import EOS, documents, write_olmo

import grain_sft
from grain_sft import PackedLayout, PaddedLayout
from grain_sft.errors import ConfigError, CorpusError, CorpusFileError, LayoutError, TransformError
from grain_sft.sampling import Host

yaml = pytest.importorskip("yaml")

LENGTH = 8
ROWS = 30
NGRAM_FILTER = "NgramFilter(max_period=13, min_period=1, max_count=32, count_padding=False)"


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


@pytest.fixture
def chats(config, tmp_path):
    """The config of 40 short documents, packed."""
    write_olmo(tmp_path / "chats", documents(40))
    corpus = {"path": str(tmp_path / "chats"), "format": "olmo", "eos_token_id": EOS}
    layout = {"kind": "packed", "sequence_length": 32}
    sampler = {"order": "olmo", "seed": 3, "global_batch_size": 4, "epochs": 2}
    return {**config, "corpus": corpus, "layout": layout, "sampler": sampler}


def write(path, config):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config) if path.suffix in (".yaml", ".yml") else json.dumps(config))
    return path


def same_batches(one, other):
    assert repr(one) == repr(other) and len(one) == len(other)
    for step in range(len(one)):
        assert_same(one[step], other[step])


def test_a_config_is_the_pipeline_it_states(config, data):
    corpus = grain_sft.open_corpus(data / "mix.txt", dtype="uint16", eos_token_id=5)
    source = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, LENGTH))
    sampler = grain_sft.IndexSampler(ROWS, global_batch_size=6, seed=3, epochs=2)
    transforms = [grain_sft.NgramFilter(max_period=5, max_count=3), grain_sft.ShiftTargets()]
    loaded = load(config)
    assert len(loaded) == 10
    same_batches(loaded, grain_sft.Pipeline(source, sampler, transforms))


def test_a_dict_and_its_json_and_yaml_are_one_config_and_the_dict_is_left_as_it_was(config, tmp_path):
    for name in ("a.json", "a.yaml", "a.yml"):
        path = write(tmp_path / "configs" / name, config)
        same_batches(load(path), load(config))
        same_batches(load(str(path)), load(config))
    for given in (config, {"inherits": str(path), "sampler": {"global_batch_tokens": 2 * LENGTH}}):
        before = copy.deepcopy(given)
        load(given)
        assert given == before


def test_the_host_given_is_the_one_that_reads_and_else_this_process_of_jax(config):
    whole, parts = load(config), [load(config, Host(index, 3)) for index in range(3)]
    for step in range(len(whole)):
        for index, part in enumerate(parts):
            np.testing.assert_array_equal(part[step]["inputs"], whole[step]["inputs"][index::3])
    assert grain_sft.load(config).sampler.host == Host(0, 1)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        (None, "(ShiftTargets(),)"),
        ([], "()"),
        ([{"shift_targets": {}}], "(ShiftTargets(),)"),
        (["ngram_filter"], f"({NGRAM_FILTER},)"),
        ([{"ngram_filter": None}], f"({NGRAM_FILTER},)"),
        ([{"ngram_filter": {}}], f"({NGRAM_FILTER},)"),
        ([{"ngram_filter": {"min_period": 2}}], f"({NGRAM_FILTER},)".replace("min_period=1", "min_period=2")),
    ],
)
def test_a_transform_is_a_name_or_a_name_with_options_and_targets_are_shifted_by_default(
    config, tmp_path, transforms, expected
):
    del config["transforms"]
    config |= {} if transforms is None else {"transforms": transforms}
    for given in (config, write(tmp_path / "a.yaml", config), write(tmp_path / "a.json", config)):
        assert repr(load(given).transforms) == expected


@pytest.mark.parametrize("section", ["one corpus", "a source of a mixture"])
def test_how_remote_files_are_read_is_given_to_the_corpus_and_changes_no_receipt(config, tmp_path, section):
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
    assert len(load(write(tmp_path / "run.yaml", config)).source) == ROWS
    config["corpus"]["root"] = str(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(CorpusError, match="elsewhere"):
        load(write(tmp_path / "run.yaml", config))


def test_what_a_config_states_replaces_what_it_inherits(config, tmp_path, monkeypatch):
    write(tmp_path / "configs" / "base.yaml", config)
    write(tmp_path / "configs" / "deep" / "middle.json", {"inherits": "../base.yaml", "sampler": {"seed": 9}})
    top = {"inherits": "deep/middle.json", "layout": {"sequence_length": 4}, "transforms": ["shift_targets"]}
    seeded = put(config, "sampler.seed", 9)
    expected = put(put(seeded, "layout.sequence_length", 4), "transforms", ["shift_targets"])
    same_batches(load(write(tmp_path / "configs" / "top.yaml", top)), load(expected))
    monkeypatch.chdir(tmp_path)  # where the parent of a dict is sought
    same_batches(load({"inherits": "configs/base.yaml", "sampler": {"seed": 9}}), load(seeded))


def test_a_batch_in_tokens_replaces_an_inherited_one_in_rows_and_the_other_way_round(config, tmp_path):
    base = str(write(tmp_path / "base.yaml", config))
    tokens = {"inherits": base, "sampler": {"global_batch_tokens": 2 * LENGTH}}
    assert load(tokens).sampler.global_batch_size == 2
    middle = str(write(tmp_path / "middle.yaml", tokens))
    assert load({"inherits": middle, "sampler": {"global_batch_size": 5}}).sampler.rows(0).size == 5


def test_a_parent_is_sought_beside_the_config_and_then_in_the_working_directory(config, tmp_path, monkeypatch):
    """A trainer's configs inherit "configs/base.json" from wherever they are."""
    write(tmp_path / "configs" / "base.json", config)
    top = write(tmp_path / "configs" / "sft" / "top.json", {"inherits": "configs/base.json", "sampler": {"seed": 9}})
    assert f"{tmp_path}/configs/sft/configs/base.json: no such file" in error_of(top)
    monkeypatch.chdir(tmp_path)
    same_batches(load(top), load(put(config, "sampler.seed", 9)))
    write(tmp_path / "configs" / "sft" / "configs" / "base.json", put(config, "sampler.global_batch_size", 3))
    assert load(top).sampler.global_batch_size == 3


def test_another_kind_of_layout_replaces_the_options_of_the_inherited_one(chats, tmp_path):
    base = str(write(tmp_path / "base.yaml", put(chats, "layout.ties", "numpy")))
    loaded = load({"inherits": base, "layout": {"kind": "padded", "keep": "first"}})
    assert repr(loaded.source.layout).startswith("PaddedLayout(sequence_length=32, keep='first'")
    loaded = load({"inherits": base, "layout": {"kind": "packed", "max_segments": 2}})
    assert loaded.source.layout.packing.ties == "numpy"


def test_inheriting_in_a_circle_or_through_hundreds_of_configs_is_an_error(config, tmp_path):
    write(tmp_path / "self.yaml", {**config, "inherits": "self.yaml"})
    write(tmp_path / "one.yaml", {"inherits": "two.yaml"})
    write(tmp_path / "two.yaml", {"inherits": "./one.yaml"})
    for given in (tmp_path / "self.yaml", tmp_path / "one.yaml", {"inherits": str(tmp_path / "two.yaml")}):
        message = error_of(given)
        assert "inherits itself, by way of" in message and str(tmp_path) in message
    write(tmp_path / "0.json", config)
    for number in range(1, 300):
        write(tmp_path / f"{number}.json", {"inherits": f"{number - 1}.json"})
    message = error_of(tmp_path / "299.json")
    assert "is inherited through 100 configs" in message and "Join some of them." in message
    assert load(tmp_path / "99.json").sampler.seed == config["sampler"]["seed"]


@pytest.mark.parametrize(
    "where", ["a.npy", ["b.npy", "a.npy"], "*.npy", "."], ids=["file", "list", "glob", "directory"]
)
def test_relative_token_paths_start_at_the_configs_folder_or_at_the_working_directory(
    config, data, monkeypatch, tmp_path, where
):
    path = write(data / "a.yaml", put(config, "corpus.path", where))
    names = where if isinstance(where, list) else ["a.npy"] if where == "a.npy" else ["a.npy", "b.npy"]
    for folder in (data, tmp_path) if where != "." else (data,):
        monkeypatch.chdir(folder)
        found = [os.path.realpath(shard.path) for shard in load(path).source.layout.corpus.shards]
        assert found == [os.path.realpath(data / name) for name in names]


def test_the_configs_folder_goes_before_the_working_directory(config, data, write_tokens, tmp_path, monkeypatch):
    here = write_tokens("here/a.npy", range(100), "uint16")
    monkeypatch.chdir(tmp_path / "here")
    elsewhere, first = tmp_path / "elsewhere", data / "a.npy"
    for folder, where, expected in ((data, "a.npy", first), (data, "*.npy", first), (elsewhere, "a.npy", here)):
        shards = load(write(folder / "a.yaml", put(config, "corpus.path", where))).source.layout.corpus.shards
        assert os.path.realpath(shards[0].path) == os.path.realpath(expected)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (PaddedLayout, {}),
        (PaddedLayout, {"keep": "first", "min_tokens": 5}),
        (PackedLayout, {}),
        (PackedLayout, {"algorithm": "first_fit_decreasing", "long_documents": "fragment", "source_group_size": 2}),
        (PackedLayout, {"ties": "numpy", "max_segments": 3, "boundaries": "eos", "bos_token_id": None}),
        (PackedLayout, {"algorithm": "concat_then_split", "max_segments": None}),
        (PackedLayout, {"seed": 5, "epochs": 1, "batch_rows": 1}),
    ],
)
def test_a_layout_of_documents_takes_the_options_of_its_class(chats, make, options):
    kind = {PaddedLayout: "padded", PackedLayout: "packed"}[make]
    loaded = load({**chats, "layout": {"kind": kind, "sequence_length": 32, **options}})
    corpus = grain_sft.open_corpus(chats["corpus"]["path"], eos_token_id=EOS)
    source = grain_sft.NpyDataSource(make(corpus, 32, **options))
    sampler = grain_sft.IndexSampler(len(source), global_batch_size=4, seed=3, epochs=2, order="olmo")
    same_batches(loaded, grain_sft.Pipeline(source, sampler, loaded.transforms))


def test_multipack_makes_the_batches_that_the_sampler_reads(chats):
    layout = {**chats["layout"], "algorithm": "multipack", "seed": 7, "epochs": 2}
    sampler = {"order": "sequential", "seed": 0, "global_batch_size": 3, "epochs": 1}
    config = {**chats, "layout": layout, "sampler": sampler}
    loaded = load(config)
    assert loaded.source.layout.packing.batch_rows == 3 and len(loaded) * 3 == len(loaded.source)
    same_batches(loaded, load(put(config, "layout.batch_rows", 3)))
    tokens = {key: value for key, value in sampler.items() if key != "global_batch_size"} | {"global_batch_tokens": 96}
    same_batches(loaded, load({**config, "sampler": tokens}))
    for place, value, expected in (
        ("layout.batch_rows", 4, "layout.batch_rows is 4, but the sampler's global batch has 3 rows"),
        ("sampler.order", "shuffle", "sampler.order is 'shuffle'; with layout.algorithm multipack"),
        ("sampler.epochs", 2, "sampler.epochs is 2; with layout.algorithm multipack"),
        ("sampler.schedule", [{"step": 1, "global_batch_size": 6}], "makes whole batches of one size beforehand"),
    ):
        assert expected in error_of(put(config, place, value))


def test_order_openchat_with_multipack_is_openchats_run(chats):
    config = put(chats, "layout.algorithm", "multipack")
    config["sampler"] = {"order": "openchat", "seed": 7, "global_batch_size": 3, "epochs": 2}
    stated = {**config, "layout": {**config["layout"], "seed": 7, "epochs": 2}}
    stated["sampler"] = {"order": "sequential", "seed": 7, "global_batch_size": 3, "epochs": 1}
    same_batches(load(config), load(stated))
    for place, value, expected in (
        ("layout.seed", 8, "layout.seed is 8, but sampler.seed is 7. Leave one out."),
        ("layout.epochs", 3, "layout.epochs is 3, but sampler.epochs is 2. Leave one out."),
        ("sampler.last_batch", "run_on", "sampler.last_batch is 'run_on'; with layout.algorithm multipack"),
        ("sampler.shuffle", False, "sampler.shuffle is False; with layout.algorithm multipack"),
    ):
        assert expected in error_of(put(config, place, value))
    del config["sampler"]["epochs"]
    assert "sampler lacks the key 'epochs': layout.algorithm multipack makes the rows of each epoch" in error_of(config)


def test_a_corpus_may_be_padded_with_another_token_and_lose_its_mask(chats):
    config = {**chats, "layout": {"kind": "padded", "sequence_length": 32}}
    whole = load(config)
    tokens, padding = (whole.source.read(range(40))[key] for key in ("tokens", "segment_ids"))
    padding = padding == 0
    assert padding.any() and (tokens[padding] == EOS).all()
    other = load(put(config, "corpus.pad_token_id", 77)).source.read(range(40))["tokens"]
    assert (other[padding] == 77).all() and (other[~padding] == tokens[~padding]).all()
    eos = load(put(config, "corpus.pad_token_id", None)).source.read(range(40))
    np.testing.assert_array_equal(eos["tokens"], tokens)
    unmasked = load(put(config, "corpus.use_loss_mask", False))
    np.testing.assert_array_equal(unmasked.source.read(range(40))["loss_mask"], ~padding)
    assert unmasked.data_key != whole.data_key


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("smapler", 1, "unknown key 'smapler'. The nearest known: 'sampler'."),
        ("corpus.pathremap", 1, "corpus: unknown key 'pathremap'. The nearest known: 'path_remap'."),
        ("layout.sequence_len", 1, "layout: unknown key 'sequence_len'. The nearest known: 'sequence_length'."),
        ("sampler.global_batch", 1, "sampler: unknown key 'global_batch'. The nearest known: 'global_batch_size'."),
        ("inherits", 5, "inherits is 5; expected the path of another config."),
        ("corpus.path", 5, "corpus.path is 5; expected text or a list."),
        ("corpus.path", [None], "corpus.path[0] is None; expected text or a number."),
        ("corpus.path", [], "empty list of files"),
        ("corpus.path", "none.txt", "none.txt"),
        ("corpus.path", "none/*.npy", "none/*.npy"),
        ("corpus.dtype", "int32", "uint32"),
        ("corpus.pad_token_id", "x", "corpus.pad_token_id is 'x'; expected an integer."),
        ("corpus.path_remap", "a=b", "corpus.path_remap is 'a=b'; expected a mapping."),
        ("corpus.remote", {"second": 7}, "corpus.remote: unknown key 'second'"),
        ("corpus.remote", {"cache": {"folder": "kept"}}, "corpus.remote.cache lacks the key 'max_bytes'"),
        ("corpus.remote", "fast", "corpus.remote"),
        ("layout.kind", "window", "layout.kind is 'window'; expected one of windows, "),
        ("layout.sequence_length", 0, "sequence_length=0: expected an integer, 1 or more"),
        ("layout.sequence_length", 10_000, "leaves no row"),
        (
            "layout.ties",
            "stable",
            "kind windows takes sequence_length, max_target_sequence_length. Take it out, or write kind: packed.",
        ),
        ("sampler.seed", -1, "sampler.seed is -1; expected an integer (0 or more)"),
        ("sampler.shuffle", 1, "sampler.shuffle is 1; expected true or false."),
        ("sampler.global_batch_size", 0, "global_batch_size is 0; expected an integer (1 or more)"),
        ("sampler.global_batch_size", 100, "global_batch_size=100 is more than"),
        ("sampler.global_batch_size", None, "give one of global_batch_size (in rows) and global_batch_tokens"),
        ("sampler.global_batch_tokens", 48, "give one of global_batch_size (in rows)"),
        ("sampler.schedule", [{"step": 3, "global_batch_tokens": 17}], "[0].global_batch_tokens is 17, which is 2"),
        ("transforms", "shift_targets", "transforms is 'shift_targets'; expected a list"),
        ("transforms", None, "transforms is None; expected a list"),
        ("transforms", ["ngram_filtre"], "transforms is 'ngram_filtre'; expected one of ngram_filter,"),
        ("transforms", [{"shift_target": {}}], "package.module:Name. The nearest known: 'shift_targets'"),
        ("transforms", [5], "transforms: 5; expected a name, or one name with its options"),
        ("transforms", [{"ngram_filter": {}, "shift_targets": {}}], "expected a name, or one name with its options"),
        ("transforms", [{"ngram_filter": [1]}], "expected a name, or one name with its options"),
        ("transforms", [{"ngram_filter": {"maxperiod": 5}}], "ngram_filter: unknown key 'maxperiod'. The nearest"),
        ("transforms", [{"ngram_filter": {"max_period": 0}}], "max_period=0: expected an integer, 1 or more"),
        ("transforms", [{"shift_targets": {"by": 1}}], "transforms.shift_targets: unknown key 'by'. It takes none."),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_the_config(config, tmp_path, place, value, expected):
    path = write(tmp_path / "a.yaml", put(config, place, value))
    message = error_of(path)
    assert message.startswith(f"{path}: ") and expected in message


def test_a_batch_in_tokens_is_whole_rows(config):
    del config["sampler"]["global_batch_size"]
    for tokens, rows in ((6 * LENGTH, 6), (LENGTH, 1)):
        assert load(put(config, "sampler.global_batch_tokens", tokens)).sampler.global_batch_size == rows
    for tokens, expected in (
        (7, "global_batch_tokens is 7, less than one row of layout.sequence_length=8"),
        (-8, "global_batch_tokens is -8, less than one row"),
        (49, "is 49, which is 6 rows of layout.sequence_length=8 and 1 tokens. Expected whole rows. Give 48 or 56."),
    ):
        assert expected in error_of(put(config, "sampler.global_batch_tokens", tokens))


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("layout.algorithm", "best_fit", "expected one of best_fit_decreasing, "),
        ("layout.algorithm", "multipack", "lacks the key 'seed': algorithm multipack packs each epoch anew by it."),
        ("layout.ties", "heap", "expected one of stable, numpy"),
        ("layout.max_segments", 0, "max_segments is 0; expected an integer (1 or more)"),
        ("layout.epochs", 2, "epochs=2: algorithm best_fit_decreasing packs every epoch the same"),
        ("layout.keep", "last", "keep is an option of kind padded; kind packed takes sequence_length, algorithm,"),
        ("layout.min_tokens", 2, "Take it out, or write kind: padded."),
    ],
)
def test_a_mistake_in_a_layout_of_documents_has_its_sentence(chats, place, value, expected):
    assert expected in error_of(put(chats, place, value))


def test_an_error_behind_a_config_stays_of_its_kind(config):
    wrong = [("corpus.path", "none.npy", CorpusFileError), ("layout.sequence_length", 10_000, LayoutError)]
    wrong += [("sampler.seed", -1, ConfigError), ("transforms", [{"ngram_filter": {"max_period": 0}}], TransformError)]
    for place, value, kind in wrong:
        with pytest.raises(kind, match=r"^config: ") as error:
            load(put(config, place, value))
        assert type(error.value) is kind


def test_every_section_and_every_required_key_is_needed(config):
    assert "config: corpus is None; expected a section with path" in error_of({})
    for section in ("corpus", "layout", "sampler"):
        for value in (None, [], "text"):
            assert f"config: {section} is {value!r}; expected a section with" in error_of({**config, section: value})
        changed = {name: value for name, value in config.items() if name != section}
        assert f"config: {section} is None; expected a section with" in error_of(changed)
    for section, key in (("corpus", "path"), ("layout", "kind"), ("layout", "sequence_length"), ("sampler", "seed")):
        changed = copy.deepcopy(config)
        del changed[section][key]
        assert error_of(changed) == f"config: {section} lacks the key {key!r}."


def test_without_an_eos_no_padding_is_made_of_it(config):
    del config["corpus"]["eos_token_id"]
    expected = "corpus.pad_token_id is null, which is the id of the token that ends a document, and the corpus"
    assert expected in error_of(put(config, "corpus.pad_token_id", None))


@pytest.mark.parametrize(
    ("name", "text", "line", "key"),
    [
        ("a.json", '{"corpus": {"path": "a"},\n "layout": {},\n "corpus": {}}', 3, "corpus"),
        ("a.json", '{"sampler": {"seed": 1, "path": "{\\"seed\\": 2",\n\n "seed" : 2}}', 3, "seed"),
        ("a.json", '{\n\t"layout":{"kind":"windows",\n\t\t"kind":"a\\/b"}}', 3, "kind"),
        ("a.json", '{"transforms": [{"x": 1}, {"x": 1,\n "y": [[]],\n "\\u0078": 1}]}', 3, "x"),
        ("a.yaml", "corpus: {path: a}\nlayout: {}\ncorpus: {}\n", 3, "corpus"),
        ("a.yaml", "sampler:\n  seed: 1\n  order: olmo\n  seed: 2\nsampler: {}\n", 4, "seed"),
        ("a.yaml", "transforms:\n- ngram_filter:\n    max_count: 1\n    'max_count': 2\n", 4, "max_count"),
    ],
)
def test_a_key_that_is_given_twice_is_an_error_with_its_line(tmp_path, name, text, line, key):
    path = tmp_path / name
    path.write_text(text)
    assert error_of(path) == f"{path}: line {line}: the key {key!r} is given a second time. Remove one of the two."


def test_one_key_in_two_sections_and_yamls_anchors_are_fine(config, tmp_path):
    text = yaml.safe_dump({key: value for key, value in config.items() if key != "sampler"})
    path = tmp_path / "a.yaml"
    path.write_text(text + "sampler: &kept {order: shuffle, seed: 3, global_batch_size: 6, epochs: 2}\n")
    same_batches(load(path), load(config))
    path.write_text(text + "sampler: {seed: &seed 3, global_batch_size: 6, epochs: *seed}\n")
    assert load(path).sampler.epochs == 3


NOT_JSON = ("", "{", "corpus: {path: a", "{'corpus': 1}", '{"a": 1,}', "[" * 100_000)
NOT_YAML = ("corpus: {path: a", "a: b: c", "\t- x", "corpus: *nothing", "{[1]: 2}", "\0", "[" * 2_000, "a: 2024-13-45")
NOT_YAML += ("a: !!int x", "a: !!bool x", "a: !!timestamp x", "a: !!binary ä", "corpus: !!python/object:os.system {}")
NOT_YAML += ("corpus: !!python/object/apply:pathlib.Path.touch [touched]",)
NO_MAPPING = {"[]": "list", "5": "int", "null": "NoneType", '"corpus"': "str"}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *(("a.json", text, "not JSON: ") for text in NOT_JSON),
        *(("a.yaml", text, "not YAML: ") for text in NOT_YAML),
        *(
            (name, text, f"expected sections corpus, layout, sampler; found a {kind}.")
            for text, kind in NO_MAPPING.items()
            for name in ("a.json", "a.yaml")
        ),
    ],
    ids=lambda value: value[:30].replace("\0", "0"),
)
def test_what_is_not_a_config_is_an_error_and_runs_nothing(tmp_path, monkeypatch, name, text, expected):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert error_of(name).startswith(f"{tmp_path}/{name}: {expected}")
    assert ("A YAML config is named .yaml" in error_of(name)) == (expected == "not JSON: ")
    assert os.listdir() == [name]


def test_a_config_or_a_key_that_cant_be_read_is_named(config, tmp_path):
    for key in (5, None, True, 1.5):  # keys of YAML that are not text
        assert f"{tmp_path}/a.yaml: unknown key {key!r}" in error_of(write(tmp_path / "a.yaml", {**config, key: 1}))
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    (tmp_path / "folder.yaml").mkdir()
    write(tmp_path / "orphan.yaml", {**config, "inherits": "none.yaml"})
    expected = {"none.json": "no such file", "folder.yaml": "can't be read", "latin.yaml": "byte 3 is not UTF-8"}
    for name, text in expected.items():
        assert str(tmp_path / name) in error_of(tmp_path / name) and text in error_of(tmp_path / name)
    assert f"{tmp_path}/none.yaml: no such file" in error_of(tmp_path / "orphan.yaml")
