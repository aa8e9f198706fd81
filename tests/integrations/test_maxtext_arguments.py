"""`python -m grain_sft.integrations.maxtext` refuses wrong arguments and data, and continues at the step of the weights.

Modules of these tests replace MaxText's.
"""

import contextlib
import importlib.util
import json
import sys
import types

import jax
import numpy as np
import pytest
from batches import load, sections, write_config
from sft_files import documents, make_pairs, write_episodes, write_pairs
from test_jax_arrays import RowSums

from grain_sft import GrainSftError, Pipeline
from grain_sft.integrations.checkpoint import RECORD, read_record
from grain_sft.integrations.jax_arrays import Block
from grain_sft.integrations.maxtext import Options, launcher, main
from grain_sft.integrations.maxtext.checks import check_batches, check_trainer, check_weights, prepare
from grain_sft.integrations.maxtext.iterators import EvaluationBatches, MaxTextBatches, continue_at, load_evaluation
from grain_sft.integrations.maxtext.options import split
from grain_sft.integrations.maxtext.trainers import KEYS, TRAINERS


@pytest.fixture
def config(tmp_path):
    np.arange(64, dtype=np.uint32).tofile(tmp_path / "a.npy")
    windows = {"corpus": {"dtype": "uint32"}, "layout": "windows", "order": "shuffle"}
    return write_config(tmp_path / "config.json", sections(tmp_path / "a.npy", 8, **windows))


def changed(config, **sampler):
    """Return the sections of the config, with these options of the sampler changed."""
    stated = json.loads(config.read_text())
    return stated | {"sampler": stated["sampler"] | sampler}


def test_keys_of_grain_sft_are_split_from_those_of_maxtext(monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_EVAL_CONFIG", "eval.json")
    monkeypatch.setenv("GRAIN_SFT_CONFIG", "lower.json")
    theirs, options = split(["base.yml", "steps=3", "grain_sft_config=a=b.json", "grain_sft_ignore_weights=True"])
    assert theirs == ["base.yml", "steps=3", "dataset_type=olmo_grain"]
    assert options == Options(config="a=b.json", eval_config="eval.json", ignore_weights=True)
    assert split(["base.yml", "dataset_type=olmo_grain"])[0] == ["base.yml", "dataset_type=olmo_grain"]
    with refused("grain_sft_trainer is 'stf': expected one of pre_train, sft, dpo, distill."):
        split(["base.yml", "grain_sft_trainer=stf"])


WRONG_ARGUMENTS = [
    ([], "grain_sft_config is not given"),
    (["grain_sft_confg=a.json", "grain_sft_cls=1"], "'grain_sft_confg'. The nearest known: 'grain_sft_config'."),
    (["grain_sft_allow_other_data=yes"], "expected true or false"),
    (["grain_sft_config={config}", "grain_sft_eval_config"], "expected grain_sft_eval_config=VALUE"),
    (["grain_sft_config={config}", "steps"], "'steps': expected key=value."),
    (["--grain_sft_config={config}"], "options have no dashes here. Write grain_sft_config="),
    (["grain_sft_trainer=dpo"], "grain_sft_trainer is given as 'sft' and as 'dpo'. Give one"),
    (["grain_sft_config={config}", "grain_sft_eval_config=nowhere.json"], "nowhere.json: no such file"),
    (["grain_sft_config={config}", "dataset_type=synthetic"], "dataset_type=synthetic: the data come from"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_in_one_line_on_stderr(config, capsys, words, message):
    assert main(["sft", "base.yml", *(word.format(config=config) for word in words)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("grain_sft.integrations.maxtext: ") and error.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("maxtext") is not None, reason="maxtext is installed")
def test_without_maxtext_the_error_names_the_page_on_its_installation(config, capsys):
    assert main(["base.yml", f"grain_sft_config={config}"]) == 1
    assert "docs/maxtext.md" in capsys.readouterr().err


def test_an_evaluation_reads_every_row_once_and_fills_the_last_batch_unless_its_config_states_otherwise(config):
    other = write_config(config.with_name("other.json"), changed(config, epochs=3, last_batch="drop"))
    for path, expected in ((config, (1, "fill", 2)), (other, (3, "drop", 6))):
        pipeline = load_evaluation(str(path))
        assert (pipeline.sampler.epochs, pipeline.sampler.last_batch, len(pipeline)) == expected
    for name in ("corpus", "sampler"):  # a section that only the stages state gets no defaults of an evaluation
        stated = changed(config)
        section = stated.pop(name)
        stated["stages"] = [{name: section, "steps": steps} for steps in (1, 2)]
        assert len(load_evaluation(str(write_config(other, stated)))) == 3


def test_loss_weights_are_refused_unless_grain_sft_ignore_weights_is_true(tmp_path):
    write_episodes(tmp_path, documents(weights=True))
    stated = sections(tmp_path, 32, corpus={"format": "episodes", "eos_token_id": 2}, layout="padded")
    weighted = load(stated)
    with refused(r"sft: the corpus has weights .* grain_sft_ignore_weights=true"):
        check_weights(weighted, "sft", ignore=False)
    check_weights(weighted, "sft", ignore=True)
    assert tuple(prepare(1000, "sft")(0, Block(np.arange(4), None), weighted[0])) == KEYS
    stated["corpus"]["use_loss_mask"] = False
    check_weights(load(stated), "sft", ignore=False)


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(config):
    pipeline = load(str(config))
    for block in (Block(np.array([1, 3]), None), Block(np.array([0, 3]), (4, 8))):
        batch = pipeline.read(0, block.rows, columns=block.columns)
        assert prepare(64, "here")(0, block, batch)["inputs"] is batch["inputs"]
        largest = int(batch["inputs"].max())
        (row, column) = np.argwhere(batch["inputs"] == largest)[0]
        column += (block.columns or [0])[0]
        place = f"here: step 0, row {block.rows[row]} of the global batch, column {column} of inputs"
        with refused(rf"{place}: token {largest}, .* is {largest}\."):
            prepare(largest, "here")(0, block, batch)
        with refused(f"of targets: token {largest + 1}, but"):  # after drop_last_position, only targets may have it
            prepare(largest + 1, "here")(0, block, batch | {"targets": batch["inputs"] + 1})


def refused(message):
    return pytest.raises(GrainSftError, match=message)


def check(theirs, data, trainer="pre_train"):
    check_batches(theirs, data, "here", TRAINERS[trainer], training=True)


def maxtext_config(**changed):
    """Return the keys of MaxText's config that the checks read. The values fit the pipeline of the fixture `config`."""
    shapes = {"global_batch_size_to_train_on": 4, "max_target_length": 8, "vocab_size": 64, "packing": True, "steps": 2}
    options = {"dataset_type": "olmo_grain", "enable_rampup_batch_size": False, "expansion_factor_real_data": -1.0}
    return types.SimpleNamespace(**shapes | options | changed)


def test_options_of_maxtext_with_which_a_step_is_not_a_batch_are_refused():
    check_trainer(maxtext_config())
    for key, value, advice in (
        ("dataset_type", "synthetic", "Remove the key"),
        ("enable_rampup_batch_size", True, "Set it to false"),
        ("reuse_example_batch", 1, "Set it to 0"),
        ("training_objective", "block_diffusion", "Choose another objective"),
        ("expansion_factor_real_data", 0.5, "Set it to -1"),
    ):
        with refused(rf"MaxText's {key} is {value!r}: .* {advice}\."):
            check_trainer(maxtext_config(**{key: value}))


def test_stages_that_change_the_data_are_accepted_and_those_that_change_the_shape_are_refused(config):
    def staged(**second):
        return load({**changed(config), "stages": [{"steps": 1}, {"steps": 1, **second}]})

    reseeded = staged(sampler={"seed": 5})
    check(maxtext_config(), reseeded)
    assert reseeded.end_step == maxtext_config().steps and len(reseeded.stages) == 2
    shapes = maxtext_config(gradient_accumulation_steps=1, per_device_batch_size=4, num_target_devices=1)
    with refused("the global batch has 8 rows, but MaxText's global_batch_size_to_train_on is 4"):
        check(shapes, staged(sampler={"global_batch_size": 8}))
    with refused("inputs has 4 tokens a row, but 8 by MaxText's max_target_length"):
        check(maxtext_config(), staged(layout={"sequence_length": 4}))


def test_data_that_end_early_are_refused_and_a_step_of_tunix_takes_micro_batches(config):
    assert [TRAINERS[name].step_after(4) for name in ("pre_train", "sft")] == [5, 4]
    finite = load(changed(config, epochs=1))  # 2 batches of 4 rows
    check(maxtext_config(), finite)
    check(maxtext_config(), Pipeline(finite.source, finite.sampler, [*finite.transforms, RowSums()]))
    with refused(r"here: the data end after 2 steps, .* steps is 3; .* Set steps=2"):
        check(maxtext_config(steps=3), finite)
    keys = maxtext_config(gradient_accumulation_steps=2, global_batch_size_to_train_on=8, steps=1)
    keys.use_tunix_gradient_accumulation = True
    check(keys, finite, "sft")
    keys.steps = 2
    with refused("the data end after 1 steps, but MaxText's steps is 2"):
        check(keys, finite, "sft")
    keys.use_tunix_gradient_accumulation = False
    with refused(r"for its micro-batches\. Set use_tunix_gradient_accumulation=true"):
        check(keys, finite, "sft")


@pytest.mark.parametrize(("name", "first"), [("pre_train", "get_first_step"), ("sft", "train_model")])
def test_the_data_continue_at_the_step_of_the_restored_weights(name, first):
    """The wrapped functions of MaxText still get their own arguments and return their own results."""
    followed, restored = [], types.SimpleNamespace(train_steps=6, grad_accumulator=None)
    module = types.SimpleNamespace(**{first: lambda *arguments: 6 if name == "pre_train" else arguments})
    TRAINERS[name].follow(module, followed.append)
    config = maxtext_config(gradient_accumulation_steps=1)
    arguments = (config, restored, "mesh")
    assert getattr(module, first)(*arguments) == (6 if name == "pre_train" else arguments)
    assert followed == [6]
    if name == "sft":  # Tunix's train step fails if gradients are accumulated without a `grad_accumulator`
        config.gradient_accumulation_steps, config.use_tunix_gradient_accumulation = 2, True
        with refused("train_sft fails above 1 with this google-tunix"):
            module.train_model(*arguments)
        restored.grad_accumulator = "accumulator"
        assert module.train_model(*arguments) == arguments and followed == [6, 6]


@pytest.mark.parametrize(("name", "first"), [("sft", "train"), ("dpo", "train"), ("distill", "train_distill")])
def test_the_data_are_checked_before_weights_are_loaded(name, first):
    calls = []
    module = types.SimpleNamespace(**{first: lambda *arguments: calls.append(arguments) or "result"})
    TRAINERS[name].check_first(module, calls.append)
    assert getattr(module, first)("config", "recorder") == "result"
    assert calls == ["config", ("config", "recorder")]


def test_a_trainer_of_texts_refuses_pairs_and_a_trainer_of_pairs_refuses_texts(config, tmp_path):
    write_pairs(tmp_path / "pairs", [*make_pairs(20, 1), [[5], [], [6]]])
    write_pairs(tmp_path / "whole", [pair for pair in make_pairs(20, 1) if all(pair)])
    texts, pairs = load(str(config)), load(sections(tmp_path / "pairs", 32, layout="pairs"))
    amendments = [{"withdraw": {"from": 9, "documents": 3}}]
    withdrawn = load(sections(tmp_path / "whole", 32, layout="pairs") | {"amendments": amendments})

    def check_with(data, trainer="dpo", algorithm="dpo", prompt_length=16):
        of_pairs = types.SimpleNamespace(max_prompt_length=prompt_length, algo=algorithm)
        keys = maxtext_config(max_target_length=32, dpo=of_pairs, vocab_size=256, gradient_accumulation_steps=1)
        check(keys, data, trainer)

    check_with(pairs)
    with refused("rows are preference pairs, but this trainer takes texts.* first word of the command: dpo"):
        check_with(pairs, trainer="sft")
    with refused("rows are texts, but this trainer takes preference pairs.*: pre_train, sft, distill"):
        check_with(texts)
    with refused(r"a response of pair \d+ has no tokens, and ORPO's loss of it is infinite"):
        check_with(pairs, algorithm="orpo")
    with refused("withdrawn pairs have no tokens, and ORPO's loss"):
        check_with(withdrawn, algorithm="orpo")
    with refused(r"prompt_ids has 16 tokens .* 8 by .* Set layout.sequence_length: 32 and layout.prompt_length: 8, or"):
        check_with(pairs, prompt_length=8)


def test_the_data_continue_at_the_step_that_a_distillation_restores():
    class Trainer:
        def setup_checkpoint_manager_and_restore(self, batches, config):
            self.train_steps = 6
            return batches

    followed, module = [], types.SimpleNamespace(MaxTextDistillationTrainer=Trainer)
    TRAINERS["distill"].follow(module, followed.append)
    assert module.MaxTextDistillationTrainer().setup_checkpoint_manager_and_restore("batches", "config") == "batches"
    assert followed == [6]


@pytest.fixture
def sharding():
    return jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec("data"))


def test_batches_end_at_the_last_step_of_maxtext_or_of_the_data(config, sharding):
    pipeline = load(changed(config, epochs=1))
    for count, expected in ((1, 1), (2, 2), (3, 2), (None, 2)):
        batches = MaxTextBatches(pipeline, sharding, count)
        assert len(list(batches)) == expected and batches.failure is None
        batches.close()


def test_the_error_of_the_data_is_raised_rather_than_the_error_of_maxtext(config, sharding, monkeypatch):
    failing = MaxTextBatches(load(str(config)), sharding, None, prepare=prepare(1, "here"))
    interface = types.SimpleNamespace()

    def run(arguments):
        with contextlib.suppress(GrainSftError):
            next(interface.make_olmo_grain_train_iterator(None, None, []))
        raise AssertionError("of MaxText")

    trainer = types.SimpleNamespace(__file__="", main=run, get_first_step=None)
    pipelines = types.SimpleNamespace(input_pipeline_interface=interface)
    replaced = {"": types.ModuleType(""), ".input_pipeline": pipelines, ".trainers.pre_train.train": trainer}
    for name, module in replaced.items():
        monkeypatch.setitem(sys.modules, f"maxtext{name}", module)
    monkeypatch.setattr(launcher.iterators, "make_train_iterator", lambda *_, options: failing)
    with refused("MaxText's vocab_size is 1"):
        launcher.train([], Options())
    assert trainer.get_first_step is None  # the patch is undone, so a later run in this process starts clean


def test_data_that_differ_from_the_record_are_refused_unless_an_option_allows_them(config, sharding, tmp_path):
    theirs = types.SimpleNamespace(enable_checkpointing=True, checkpoint_dir=str(tmp_path / "checkpoints"))
    continue_at(0, theirs, MaxTextBatches(load(str(config)), sharding, None), Options(), [0])
    others = MaxTextBatches(load(changed(config, seed=2)), sharding, None)
    recorded = (tmp_path / RECORD).read_text()
    with refused("old data, or grain_sft_allow_other_data=true to go on at that step"):
        continue_at(1, theirs, others, Options(), [0])
    assert (tmp_path / RECORD).read_text() == recorded
    continue_at(1, theirs, others, Options(allow_other_data=True), [0])
    assert [run["next_step"] for run in read_record(str(tmp_path / RECORD))] == [0, 1]


def test_each_evaluation_begins_at_the_first_batch(config, sharding):
    """Tunix calls `iter` for each evaluation. MaxText's distillation only calls `next`, until the batches end."""
    batches = EvaluationBatches(load_evaluation(str(config)), sharding, None)
    assert len(list(batches)) == len(list(batches)) == 2
    first = next(iter(batches))
    next(batches)
    assert next(batches, None) is None
    assert np.array_equal(next(batches)["inputs"], first["inputs"])
    batches.close()
