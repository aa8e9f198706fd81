"""`load` names each mistake in a config in one sentence."""

import os
from pathlib import Path

import pytest
from batches import error_of, load, put, sections, write_config

from grain_sft.config import naming
from grain_sft.errors import ConfigError, CorpusFileError, LayoutError, TransformError


def test_the_error_names_the_config_and_the_mistake(config, tmp_path):
    for place, value, expected in (
        ("smapler", 1, "unknown key 'smapler'. The nearest known: 'sampler'."),
        ("sampler.global_batch", 1, "sampler: unknown key 'global_batch'. The nearest known: 'global_batch_size'."),
        ("stages", [{"steps": 1}, {"layout": {"sequence_length": []}}], "layout.sequence_length is []; expected an"),
        ("sampler.seed", "\ud800", "sampler.seed is '\\ud800'; expected an integer"),
        ("inherits", 5, "inherits is 5; expected the path of another config."),
        ("corpus.path", 5, "corpus.path is 5; expected text or a list."),
        ("corpus.path", [None], "corpus.path[0] is None; expected text or a number."),
        ("corpus.path", "none.txt", "none.txt"),
        ("corpus.dtype", "int32", "uint32"),
        ("corpus.remote", {"second": 7}, "corpus.remote: unknown key 'second'"),
        ("corpus.remote", {"cache": {"folder": "kept"}}, "corpus.remote.cache lacks the key 'max_bytes'"),
        ("layout.kind", "window", "layout.kind is 'window'; expected one of windows, "),
        ("layout.sequence_length", 10_000, "leaves no row"),
        ("layout.ties", "stable", "max_target_sequence_length. Take it out, or write kind: packed."),
        ("sampler.seed", -1, "sampler.seed is -1; expected an integer (0 or more)"),
        ("sampler.global_batch_size", 0, "global_batch_size is 0; expected an integer (1 or more)"),
        ("sampler.global_batch_size", 100, "global_batch_size=100 is more than"),
        ("sampler.global_batch_size", None, "give one of global_batch_size (in rows) and global_batch_tokens"),
        ("sampler.global_batch_tokens", 48, "give one of global_batch_size (in rows)"),
        ("sampler.schedule", [{"step": 3, "global_batch_tokens": 17}], "[0].global_batch_tokens is 17, which is 2"),
        ("transforms", "shift_targets", "transforms is 'shift_targets'; expected a list"),
        ("transforms", [{"shift_target": {}}], "package.module:Name. The nearest known: 'shift_targets'"),
        ("transforms", [{"ngram_filter": {}, "shift_targets": {}}], "expected a name, or one name with its options"),
        ("transforms", [{"ngram_filter": {"maxperiod": 5}}], "ngram_filter: unknown key 'maxperiod'. The nearest"),
        ("transforms", [{"ngram_filter": {"max_period": 0}}], "max_period=0: expected an integer, 1 or more"),
        ("transforms", [{"shift_targets": {"by": 1}}], "transforms.shift_targets: unknown key 'by'. Expected no keys."),
        ("transforms", ["builtins:getattr"], "builtins:getattr has no signature"),
    ):
        path = write_config(tmp_path / "a.yaml", put(config, place, value))
        message = error_of(path)
        assert message.startswith(f"{path}: ") and expected in message, (place, value)


def test_the_error_names_a_mistake_in_a_layout_of_documents(chats):
    for place, value, expected in (
        ("layout.algorithm", "best_fit", "expected one of best_fit_decreasing, "),
        ("layout.algorithm", "multipack", "lacks the key 'seed': algorithm multipack shuffles by it."),
        ("layout.epochs", 2, "epochs=2: algorithm best_fit_decreasing packs every epoch the same"),
        ("layout.keep", "last", "keep is an option of kind padded; kind packed takes sequence_length, algorithm,"),
    ):
        assert expected in error_of(put(chats, place, value)), (place, value)


def test_an_error_names_the_config_and_keeps_its_class(config):
    of_filter = [{"ngram_filter": {"max_period": 0}}]
    wrong = [("corpus.path", "", CorpusFileError), ("sampler.seed", -1, ConfigError)]
    wrong += [("layout.sequence_length", 10_000, LayoutError), ("transforms", of_filter, TransformError)]
    for place, value, kind in wrong:
        with pytest.raises(kind, match=r"^config: ") as error:
            load(put(config, place, value))
        assert type(error.value) is kind


class PluginError(ConfigError):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)


def test_a_plugins_error_is_raised_unchanged_if_its_class_takes_other_arguments():
    with pytest.raises(PluginError), naming("config"):
        raise PluginError("message", 5)


def test_a_former_key_is_renamed_except_as_the_name_of_a_source(config):
    sampler = {key: value for key, value in config["sampler"].items() if key != "epochs"}
    mixture = {**config, "corpus": {"mixture": {"when_dry": {**config["corpus"], "weight": 1}}}, "sampler": sampler}
    assert list(load(mixture).source.layout.parts) == ["when_dry"]
    with pytest.warns(FutureWarning, match="when_dry is now on_exhausted"):
        message = error_of(put(put(mixture, "sampler.when_dry", "stop"), "sampler.on_exhausted", "stop"))
    assert message == "config: when_dry and on_exhausted, its new name, are both given. Remove when_dry."


def test_a_missing_section_and_a_missing_required_key_are_named(config):
    assert error_of(5).startswith("load: config is 5 (int); expected the path of a config, or a mapping")
    assert "config: corpus is None; expected a section with path" in error_of({})
    for section in ("corpus", "layout", "sampler"):
        for value in (None, [], "text"):
            assert f"config: {section} is {value!r}; expected a section with" in error_of({**config, section: value})
    for section, key in (("corpus", "path"), ("layout", "kind"), ("layout", "sequence_length"), ("sampler", "seed")):
        changed = {name: value for name, value in config[section].items() if name != key}
        assert error_of({**config, section: changed}) == f"config: {section} lacks the key {key!r}. Add it."
    del config["corpus"]["eos_token_id"]
    expected = "corpus.pad_token_id is null, which means the EOS id, but the corpus has none. Give corpus.eos_token_id"
    assert expected in error_of(put(config, "corpus.pad_token_id", None))


def test_the_error_of_a_key_that_is_given_twice_names_its_line(tmp_path):
    for name, text, line, key in (
        ("a.json", '{"corpus": {"path": "a"},\n "layout": {},\n "corpus": {}}', 3, "corpus"),
        ("a.json", '{"sampler": {"seed": 1, "path": "{\\"seed\\": 2",\n\n "seed" : 2}}', 3, "seed"),
        ("a.json", '{\n\t"layout":{"kind":"windows",\n\t\t"kind":"a\\/b"}}', 3, "kind"),
        ("a.json", '{"transforms": [{"x": 1}, {"x": 1,\n "y": [[]],\n "\\u0078": 1}]}', 3, "x"),
        ("a.json", '{"a": "\x7f", "seed": 1,\n "seed": 2}', 2, "seed"),
        ("a.yaml", "corpus: {path: a}\nlayout: {}\ncorpus: {}\n", 3, "corpus"),
        ("a.yaml", "sampler:\n  seed: 1\n  order: olmo\n  seed: 2\nsampler: {}\n", 4, "seed"),
        ("a.yaml", "transforms:\n- ngram_filter:\n    max_count: 1\n    'max_count': 2\n", 4, "max_count"),
    ):
        path = tmp_path / name
        path.write_text(text)
        assert error_of(path) == f"{path}: line {line}: the key {key!r} is given a second time. Remove one of the two."


@pytest.mark.parametrize("place", ["layout.kind", "layout.algorithm", "sampler.order", "corpus.format"])
def test_a_name_of_a_module_instead_of_a_class_is_an_error(tmp_path, place):
    (tmp_path / "tokens.npy").write_bytes(bytes(64))
    config = sections(tmp_path / "tokens.npy", 8, corpus={"dtype": "uint16", "eos_token_id": 0})
    assert "'os:path' is a module; expected a class or a function" in error_of(put(config, place, "os:path"))


def test_a_number_in_base_8_or_60_is_an_error(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# seed\nsampler: {seed: 0_17}\n")
    assert error_of(path) == f"{path}: line 2: 0_17 is 15 in YAML 1.1 and 17 in YAML 1.2. Write 17 or 15."
    path.write_text(write_config(path, sections("tokens.npy", 8)).read_text().replace("seed: 1", "seed: 2:17"))
    assert error_of(path) == f"{path}: sampler.seed is '2:17'; expected an integer (0 or more)."


NOT_JSON = ("", "{", "corpus: {path: a", "{'corpus': 1}", "[" * 100_000)
NOT_YAML = ("corpus: {path: a", "\t- x", "corpus: *nothing", "{[1]: 2}", "\0", "[" * 2_000, "a: 2024-13-45")
NOT_YAML += ("a: !!int x", "a: !!binary ä", "corpus: !!python/object/apply:pathlib.Path.touch [touched]")


def test_text_that_is_not_a_config_is_refused_and_none_of_it_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text, expected in (
        *(("a.json", text, "not JSON: ") for text in NOT_JSON),
        *(("a.yaml", text, "not YAML: ") for text in NOT_YAML),
        ("a.yaml", "corpus: &all\n  mixture: *all\n", "not YAML: Circular reference detected"),
        ("a.json", "[]", "expected sections corpus, layout, sampler; found []."),
        ("a.json", "5", "expected sections corpus, layout, sampler; found 5."),
        ("a.yaml", "null", "expected sections corpus, layout, sampler; found nothing."),
    ):
        Path(name).write_text(text)
        assert error_of(name).startswith(f"{tmp_path}/{name}: {expected}"), text[:30]
        assert ("A YAML config is named .yaml" in error_of(name)) == (expected == "not JSON: "), text[:30]
        assert {*os.listdir()} <= {"a.json", "a.yaml"}, text[:30]


def test_a_file_that_cannot_be_read_and_a_key_that_is_not_text_are_named(config, tmp_path):
    for key in (5, None, True, 1.5):  # keys of YAML that are not text
        path = write_config(tmp_path / "a.yaml", {**config, key: 1})
        assert f"{path}: unknown key {key!r}" in error_of(path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    (tmp_path / "folder.yaml").mkdir()
    write_config(tmp_path / "orphan.yaml", {**config, "inherits": "none.yaml"})
    expected = {"none.json": "no such file", "folder.yaml": "can't be read", "latin.yaml": "byte 3 is not UTF-8"}
    for name, text in expected.items():
        assert str(tmp_path / name) in error_of(tmp_path / name) and text in error_of(tmp_path / name)
    missing = f"{tmp_path}/none.yaml: no such file. {tmp_path}/orphan.yaml inherits it. Fix the path."
    assert error_of(tmp_path / "orphan.yaml").endswith(missing)
