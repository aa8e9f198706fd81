"""Tables of checkpoints have the steps, epochs, rows and tokens of a run, such as the SFT runs of OLMo 3 Think.

`difference` finds where the batches of two pipelines differ. See also tests/pipeline/test_amendments.py.
"""

import functools
import gzip
from pathlib import Path

import batches
import grain
import numpy as np
import pytest
from sft_files import documents, write_episodes

import grain_sft
from grain_sft import Host, PackedLayout, PaddedLayout, Pipeline, open_corpus
from grain_sft.bench.config import report_speed
from grain_sft.errors import PipelineError, RowIndexError, SamplerError
from grain_sft.provenance import checkpoint_table, difference, step_of_checkpoint, steps_between, trace
from grain_sft.sampling import ORDERS

CONFIGS = Path(__file__).parents[2] / "configs"
TOKENS_OF_RUN = {"7b": 45.4e9, "32b": 45.2e9}  # tokens of both epochs, from table 47 of the OLMo 3 paper


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Pipelines of the shipped configs, with as many rows as OLMo's runs had. Each row is a document of one token."""
    made = {}
    for name, tokens in TOKENS_OF_RUN.items():
        rows = int(tokens / 2 / 32_768)
        folder = tmp_path_factory.mktemp(name)
        np.full(rows, 100_257, "<u4").tofile(folder / "token_ids_part_0000.npy")
        np.ones(rows, bool).tofile(folder / "labels_mask_part_0000.npy")
        lines = "".join(f"{row},{row + 1}\n" for row in range(rows))
        (folder / "token_ids_part_0000.csv.gz").write_bytes(gzip.compress(lines.encode(), 1))
        config = {"inherits": str(CONFIGS / f"olmo3_{name}_think_sft.yaml"), "corpus": {"path": str(folder)}}
        config["layout"] = {"max_segments": 1}
        made[name] = grain_sft.load(config, host=Host(0, 8))  # 64 GPUs: 8 data-parallel ranks of 8
    return made


def test_the_checkpoint_tables_of_olmo_3_think_have_its_steps_and_tokens(runs):
    assert steps_between(runs["7b"], "step1000", "step7000") == range(1000, 7000)
    table = checkpoint_table(runs["7b"])
    assert table["step"] == [*range(1000, 43_001, 1000), 43_296]
    for number, step in enumerate(table["step"]):  # an epoch has 21,648 steps of 32 rows of 32,768 tokens
        assert table["epoch"][number] * 21_648 + table["steps_into_epoch"][number] == step
        assert table["rows"][number] == 32 * step
        assert table["tokens"][number] == 1_048_576 * step
        assert table["rows_into_epoch"][number] == 32 * table["steps_into_epoch"][number]
    assert table["epoch"][table["step"].index(25_000)] == 1
    assert table["steps_into_epoch"][table["step"].index(25_000)] == 3_352
    assert table["epoch"][-1] == 2 and table["steps_into_epoch"][-1] == 0  # the run is done
    large = checkpoint_table(runs["32b"], every=1000)
    assert large["step"][-1] == 10_776 and large["tokens"][0] == 4_194_304_000
    for name, found in (("7b", table), ("32b", large)):
        assert found["tokens"][-1] == pytest.approx(TOKENS_OF_RUN[name], rel=2e-4)  # the last rows fill no step


NAMES = {"step7000": 7000, "7000": 7000, "gs://b/run-2/step7000/": 7000, "OLMo_step-12-hf": 12, "model_step3": 3}
NAMES |= {"checkpoint-7000": 7000, "gs://b/run/iter_0007000/": 7000, "checkpoint1-step7": 7}


def test_names_of_checkpoints_have_one_step():
    assert [step_of_checkpoint(name) for name in NAMES] == list(NAMES.values())
    for name in ("latest", "", "step", "stepping7", "step1-step2", "7b", "step\u0663", "9" * 5000):
        with pytest.raises(RowIndexError, match="step7000"):
            step_of_checkpoint(name)


pipeline_of = functools.partial(batches.pipeline_of, epochs=2)


@pytest.mark.parametrize("last_batch", ["drop", "run_on"])
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_table_of_every_step_counts_the_rows_of_the_traces(tmp_path, order, last_batch, hosts):
    layout = PaddedLayout(open_corpus(write_episodes(tmp_path, documents(39))), 16)
    pipeline = pipeline_of(layout, order=order, host=Host(hosts - 1, hosts), last_batch=last_batch)
    table = checkpoint_table(pipeline, 1)
    whole = trace(pipeline, range(pipeline.sampler.num_steps), trainable=False)
    assert table["step"] == list(range(1, pipeline.sampler.num_steps + 1))
    assert table["rows"] == np.searchsorted(whole.step, table["step"]).tolist()  # each row is one document
    for step, epoch, steps, rows in zip(*list(table.values())[:4], strict=True):
        done = whole.epoch[whole.step < step]
        assert rows == np.count_nonzero(done == epoch) and steps == rows // 4
        if step < pipeline.sampler.num_steps:
            assert whole.epoch[whole.step == step][0] == epoch


def test_a_table_counts_the_epochs_of_a_layout_that_is_packed_again_for_each_epoch(tmp_path):
    corpus = open_corpus(write_episodes(tmp_path / "chats", documents(60)))
    layout = PackedLayout(corpus, 32, algorithm="shuffled_best_fit", seed=2, epochs=3, cache_dir=tmp_path)
    pipeline = pipeline_of(layout, order="sequential", epochs=1)
    table, whole = checkpoint_table(pipeline, 1), trace(pipeline, range(pipeline.sampler.num_steps))
    for step, epoch in zip(table["step"][:-1], table["epoch"][:-1], strict=True):
        assert whole.epoch[whole.step == step][0] == epoch
    assert max(whole.epoch) == 2


def test_steps_and_epochs_that_a_run_does_not_have_are_refused(tmp_path):
    pipeline = pipeline_of(PaddedLayout(open_corpus(write_episodes(tmp_path, documents(40))), 16))
    for last, words in (("step5", "earlier, then a later checkpoint"), ("step99", "ends after 20 steps")):
        with pytest.raises(RowIndexError, match=words):
            steps_between(pipeline, "step5", last)
    with pytest.raises(SamplerError, match="epochs=3"):
        checkpoint_table(pipeline, epochs=3)
    endless = pipeline_of(pipeline.source.layout, epochs=None)
    assert checkpoint_table(endless, 7)["step"] == [7, 10]
    assert checkpoint_table(endless, 7, epochs=2)["step"] == [7, 14, 20]
    skipped = Pipeline(endless.source, endless.sampler, amendments=[grain_sft.pipeline.Amendment(1, skip=2)])
    assert skipped.sampler.end_of_batches == endless.sampler.end_of_batches
    assert list(checkpoint_table(skipped, 7))[:3] == ["step", "epoch", "rows_into_epoch"]
    assert steps_between(endless, "1", "10000") == range(1, 10000)


def test_steps_after_the_end_of_both_runs_do_not_differ(make):
    one, other = (make(audit=None, epochs=1, seed=seed) for seed in (1, 2))
    end = one.end_step
    assert difference(one, one, steps=range(end + 5)).compared == range(end)
    for steps in (range(end + 5), range(end, end + 5)):
        assert difference(one, one, steps=steps).first_step is None
    assert difference(one, other, steps=range(end, end + 5)).first_step is None
    assert difference(one, make(audit=None, epochs=2, seed=1), steps=range(end + 5)).first_step == end
    for steps in (range(0, 6, 2), range(-3, 6), 6):
        with pytest.raises(RowIndexError, match="expected consecutive steps from 0 on"):
            difference(one, other, steps=steps)


class TokenInColumn(grain.transforms.Map):
    """Add an array [rows], the token of each row in one column, and a number."""

    def __init__(self, column):
        self.column = column

    def map(self, element):
        return element | {"token": element["inputs"][:, self.column], "scale": 0.5}


def test_arrays_with_any_number_of_axes_are_compared(make):
    plain, steps = make(audit=None), range(3)
    pair = [Pipeline(plain.source, plain.sampler, [*plain.transforms, TokenInColumn(column)]) for column in range(2)]
    rows = np.concatenate([plain[step]["inputs"] for step in steps])
    found = difference(*pair, steps=steps, count=len(steps))
    assert found.differing_rows == np.count_nonzero(rows[:, 0] != rows[:, 1]) and found.total_rows == len(rows)


def test_batches_that_are_not_dicts_are_refused(make):
    plain = make(audit=None)
    transform = type("Tuples", (grain.transforms.Map,), {"map": lambda self, element: tuple(element.values())})()
    changed = Pipeline(plain.source, plain.sampler, [transform])
    for call in (lambda: difference(plain, changed, steps=range(1)), lambda: report_speed(changed, 0.01)):
        with pytest.raises(PipelineError, match="expected a dict of arrays"):
            call()
