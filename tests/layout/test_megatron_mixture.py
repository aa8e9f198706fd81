"""A mixture of an OLMo mix, a Megatron blend and an SFT corpus can be resumed, traced, verified and inspected."""

import pickle

import numpy as np
import pytest
from batches import assert_is_traced, assert_one_run, error_of, load, sections, write_config
from megatron_corpora import EOD, PAD, write_prefixes
from sft_files import documents, write_olmo

from grain_sft import Host
from grain_sft.provenance import find_document, trace

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def config(tmp_path, write_tokens):
    write_prefixes(tmp_path)
    write_olmo(tmp_path / "sft", documents(60))
    random = np.random.default_rng(0)
    lines = [f"{name},{write_tokens(f'{name}.npy', random.integers(0, 99, 999), 'uint16').name}" for name in "xyz"]
    (tmp_path / "mix.txt").write_text("\n".join(lines))
    blend = ["0.7", str(tmp_path / "b"), "0.3", str(tmp_path / "sentences")]
    rows = {"kind": "megatron_gpt", "sequence_length": 32, "num_samples": 90}
    own = {"format": "megatron", "eos_token_id": EOD, "pad_token_id": PAD, "layout": rows}
    plain = {"dtype": "uint16", "eos_token_id": 2}
    sources = {
        "mix": {"weight": 5, "path": str(tmp_path / "mix.txt"), **plain},
        "blend": {"weight": 3, "path": blend, **own},
        "sft": {"weight": 2, "path": str(tmp_path / "sft"), "layout": {"kind": "packed"}, **plain},
    }
    config = sections(None, 33, corpus={"mixture": sources}, layout="windows", global_batch_size=10)
    return config | {"transforms": ["shift_targets", "drop_last_position"]}


def test_the_run_resumes_at_any_step_on_other_hosts_and_its_trace_names_documents(config, tmp_path, run_command):
    assert_one_run(lambda host: load(config, host), range(30, 32), [1, 2])
    whole, halves = load(config), [load(config, Host(index, 2)) for index in range(2)]
    assert whole[30]["inputs"].shape == (10, 32)
    lines = trace(whole, range(30, 31), host=Host(0, 1))
    assert_is_traced(trace(halves[0], range(30, 31)), halves, range(30, 31))
    for part in whole.source.layout.parts.values():
        assert {shard.path for shard in part.corpus.shards} & {lines.paths[shard] for shard in lines.shard.tolist()}
    at = [lines.paths[shard].endswith("b.bin") for shard in lines.shard].index(True)
    found = find_document(whole, int(lines.document[at]), epochs=2)
    assert (30, int(lines.row[at])) in set(zip(found.step.tolist(), found.row.tolist(), strict=True))
    path = write_config(tmp_path / "run.json", config)
    for command in (("verify", path, "--full"), ("inspect", path, "--step", "3"), ("receipt", path)):
        run_command(*command)


def test_an_option_without_its_transform_is_refused(config):
    config["corpus"]["mixture"]["blend"]["layout"]["reset_attention_mask"] = True
    assert "options of the layout of source 'blend' need {'reset_at_eod': {'eod_token_id': 7," in error_of(config)


def test_a_config_of_sources_with_different_layouts_must_state_transforms(config):
    del config["transforms"]
    assert "lacks the key 'transforms', and the layouts of its sources" in error_of(config)


def test_a_pickled_blend_is_small_and_opens_its_indices_again(config):
    layout = load(config).source.layout.parts["blend"]
    assert len(pickle.dumps(layout)) < 20_000 and repr(pickle.loads(pickle.dumps(layout))) == repr(layout)
