"""Layout `megatron_gpt` has the rows of Megatron-core's `GPTDataset` and `BlendedDataset`, and of MaxText's `mmap*`.

A mixture with such a blend can be resumed, traced, verified and inspected. `blend` chooses the data set of each
sample, as megatron-core's compiled loop does.
"""

import hashlib
import pickle
import re

import megatron_corpora
import numpy as np
import pytest
from batches import assert_is_traced, assert_one_run, error_of, golden_values, load, sections, write_config
from megatron_corpora import BLEND_SIZE, BLENDS, EOD, FEW, LENGTH, PAD, hashes_of, write_prefixes
from sft_files import documents, write_olmo

from grain_sft import GrainSftError, Host, NpyDataSource
from grain_sft.layout.megatron import blending
from grain_sft.layout.megatron.blending import BLOCK, blend, normalized
from grain_sft.provenance import find_document, trace
from grain_sft.view import view_rows

pytestmark = pytest.mark.usefixtures("own_cache")
GOLDEN = golden_values("megatron_samples.json")["cases"]
MAXTEXT_GOLDEN = golden_values("maxtext/mmap.json")["cases"] | golden_values("maxtext/mmap_split.json")["cases"]
RUNS = megatron_corpora.runs()
MAXTEXT_RUNS = megatron_corpora.maxtext_runs() | megatron_corpora.split_runs()
SHUFFLED_RUNS = megatron_corpora.shuffled_runs()
# Keys of runs that are not options of layouts.
NOT_OF_LAYOUTS = ("blend", "split", "subset", "epochs", "hosts", "rows")
EIGHT_ROWS = {"seed": 0, "global_batch_size": 8, "epochs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    write_prefixes(folder)
    return folder


def config_of(folder, run, **sections):
    """Return the config of a run of megatron_corpora.py."""
    corpus = {"path": [str(folder / each) if isinstance(each, str) else str(each) for each in run["blend"]]}
    corpus |= {"format": "megatron", "eos_token_id": EOD, "pad_token_id": PAD}
    if run.get("split", "1,0,0") != "1,0,0":
        corpus |= {"split": run["split"], "subset": run["subset"]}
    layout = {"kind": "megatron_gpt", "sequence_length": LENGTH}
    layout |= {key: value for key, value in run.items() if key not in NOT_OF_LAYOUTS}
    return {"corpus": corpus, "layout": layout, "sampler": {"seed": 0, "global_batch_size": 1, "epochs": 1}} | sections


def arrays_of(batch):
    """Return megatron-core's arrays of a batch: tokens, labels, loss mask, positions and the mask of forbidden attention."""
    segments, loss = batch["inputs_segmentation"], batch["targets_segmentation"] != 0
    shown = np.tril(segments[:, :, None] == segments[:, None, :])
    labels = np.where(segments == 0, 0, batch["targets"])
    return batch["inputs"], labels, loss.astype("<f4"), batch["inputs_position"], ~shown[:, None]


def first_rows(folder, run, samples):
    """Return the first rows of a run as one batch, after the pipeline's transforms. The run has `samples` rows."""
    pipeline = load(config_of(folder, run))
    assert len(pipeline.source) == samples
    element = pipeline.source.read(np.arange(min(FEW, samples)))
    for transform in pipeline.transforms:
        element = transform.map(element)
    return element


@pytest.mark.parametrize("name", RUNS)
def test_rows_are_the_samples_of_megatron_core(folder, name):
    golden, run = GOLDEN[name], RUNS[name]
    batch = first_rows(folder, run, golden["samples"])
    # Megatron-core counts positions through the padding of a row, and attends to it. This package does neither.
    padded = "drop_last_partial_sequence" in run
    keys = ("tokens", "labels", "loss_mask", *(() if padded else ("position_ids", "attention_mask")))
    assert batch["inputs"][-1].tolist() == golden["last"]
    for key, array in zip(keys, arrays_of(batch), strict=False):
        stored = array.astype("u1" if array.dtype == bool else "<i4")
        assert hashlib.sha256(stored.tobytes()).hexdigest()[:16] == golden[key], key


@pytest.mark.parametrize("name", MAXTEXT_RUNS)
def test_rows_are_those_of_maxtext(folder, name):
    golden = MAXTEXT_GOLDEN[name]
    batch = first_rows(folder, MAXTEXT_RUNS[name], golden["samples"])
    assert {"samples": golden["samples"], **hashes_of([batch])} == golden


@pytest.mark.parametrize("name", SHUFFLED_RUNS)
def test_shuffled_batches_of_each_host_are_those_of_maxtext(folder, name):
    run, found = SHUFFLED_RUNS[name], []
    sampler = {"order": "grain", "seed": run["seed"], "epochs": run["epochs"]}
    config = config_of(folder, run, sampler=sampler | {"global_batch_size": run["hosts"] * run["rows"]})
    del config["layout"]["seed"]
    for host in range(run["hosts"]):
        pipeline = load(config, host=Host(host, run["hosts"]))
        batches = [pipeline[step] for step in range(len(pipeline))]
        found.append({"batches": len(batches), **hashes_of(batches)})
    assert found == golden_values("maxtext/mmap_shuffled.json")["cases"][name]


def test_blends_that_need_more_samples_than_exist_are_refused_as_by_megatron_core(folder):
    found = {}
    for name, run in megatron_corpora.oversampled_runs().items():
        try:
            found[name] = {"samples": len(load(config_of(folder, run)).source)}
        except GrainSftError as error:
            message = re.search(r"needs (\d+) samples of it, but its stream has (\d+). Give a surplus", str(error))
            found[name] = {"taken": int(message[1]), "size": int(message[2])}
    assert found == golden_values("megatron_oversampled.json")["cases"]
    assert sum("taken" in each for each in found.values()) >= 3


def loaded(folder, name, host=Host(0, 1), **layout):
    """Return the pipeline of the run `name`, with batches of 8 rows and these options of the layout changed."""
    return load(config_of(folder, RUNS[name] | layout, sampler=EIGHT_ROWS), host=host)


STEPS_OF_RUNS = [({}, 12), ({"epochs": 2}, 24), ({"epochs": None}, None), ({"order": "shuffle"}, None)]


@pytest.mark.parametrize(("sampler", "steps"), STEPS_OF_RUNS)
def test_a_run_has_one_epoch_unless_its_sampler_states_epochs_or_an_order(folder, sampler, steps):
    """A second epoch would repeat the same rows in the same order. `num_samples` sets how often documents are read."""
    config = config_of(folder, RUNS["seed 0, 90 samples"], sampler={"seed": 0, "global_batch_size": 12, **sampler})
    assert load(config).sampler.num_steps == steps


BLEND = "blend of four, 400 samples"


def test_spans_name_the_documents_of_the_corpus(folder):
    layout = loaded(folder, BLEND).source.layout
    documents, tokens = layout.corpus.documents, layout.corpus.read(0, layout.corpus.num_tokens)[0]
    begins = np.cumsum([0, *(shard.num_tokens for shard in layout.corpus.shards)])
    for row in range(40):
        read = []
        for span in layout.spans(row):
            start, stop = span.start + begins[span.shard], span.stop + begins[span.shard]
            assert documents.start[span.document] <= start < stop
            assert stop <= documents.start[span.document] + documents.length[span.document]
            read += tokens[start:stop].tolist()
        assert read == NpyDataSource(layout)[row]["tokens"].tolist()
    some = np.unique(layout.pieces(np.arange(len(layout))).document)[[3, -3]]
    holding = [row for row in range(len(layout)) if {span.document for span in layout.spans(row)} & set(some.tolist())]
    assert layout.rows_of_documents(some).tolist() == holding


MMAP, NPY = {"variant": "mmap"}, {"variant": "mmap_npy"}
RESET, SPLIT, MASK = {"reset_attention_mask": True}, {"document_split": "9,1"}, {"eod_mask_loss": True}
CHANGES = [{}, RESET, {**RESET, "max_segments_per_row": 4}, {**RESET, "eod_token_id": 9}, {"reset_position_ids": True}]
CHANGES += [NPY, NPY | SPLIT, {**NPY, **SPLIT, "document_subset": "valid"}, {"drop_last_partial_sequence": False}]
CHANGES += [{"num_samples": 90}, {"seed": 1}, {"surplus": 0.5}, MASK, {"add_extra_token_to_sequence": False}]


def test_options_that_change_batches_change_the_receipt(folder):
    codes = [loaded(folder, BLEND, **each).receipt.code for each in CHANGES]
    codes.append(loaded(folder, "blend of three, 400 samples").receipt.code)
    assert len(set(codes)) == len(codes)


WRONG = {
    "no samples": (BLEND, {"num_samples": None}, "num_samples is missing: a corpus with weights needs it"),
    "blend of mmap": (BLEND, MMAP, "variant mmap has no weighted blend. Give corpus.mixture"),
    "too few": ("by sizes, None samples", {"sequence_length": 10**6}, "tokens are too few for one sample of 1000001"),
    "mask of mmap": (BLEND, MMAP | MASK, "eod_mask_loss=True: variant mmap masks EODs, not their targets. Remove it"),
    "split of several": ("blend, split", NPY, "corpus.split does. Give layout.document_split"),
    "split of Megatron": (BLEND, SPLIT, "document_split='9,1': megatron does not split documents. Give corpus.split"),
    "part of no split": (BLEND, NPY | {"document_subset": "valid"}, "with document_split, such as"),
    "no split": (BLEND, NPY | {"document_split": "9;1"}, "document_split='9;1': expected up to three numbers"),
    "no part": (BLEND, NPY | SPLIT | {"document_subset": "test"}, "'9,1' has nothing for document_subset='test'"),
    "empty split": (BLEND, NPY | {"document_split": "1,999"}, "0 documents of a data set have no tokens. Give more"),
    "endless surplus": (BLEND, {"surplus": 1e300}, "surplus=1e.300: expected a number from 0 to 1000"),
    "EOD": (BLEND, MASK | {"eod_token_id": 2**40}, "eod_token_id=1099511627776: expected at most"),
    "seed": (BLEND, {"seed": 2**32}, "less than 2..32, because numpy's RandomState uses it"),
}


@pytest.mark.parametrize(("name", "layout", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_errors(folder, name, layout, message):
    with pytest.raises(GrainSftError, match=message):
        loaded(folder, name, **layout)


RESETS = ("reset_attention_mask", "reset_position_ids")


@pytest.mark.parametrize("resets", [RESETS, RESETS[:1], RESETS[1:]])
def test_runs_with_resets_pass_verify_and_have_the_figures_of_trace_and_inspect(folder, tmp_path, run_command, resets):
    config = config_of(folder, RUNS[BLEND] | dict.fromkeys((*resets, "eod_mask_loss"), True), sampler=EIGHT_ROWS)
    run_command("verify", write_config(tmp_path / "run.json", config), "--full")
    pipeline = load(config)
    taken = sum(int(np.count_nonzero(pipeline[step]["targets_segmentation"])) for step in range(3))
    assert trace(pipeline, range(3), host=Host(0, 1)).trainable.sum() == taken
    for view in view_rows(pipeline, 2):
        assert not view.notes
        of_segments = np.bincount([each.segment for each in view.pieces], [each.stop - each.start for each in view.pieces])
        assert of_segments.sum() in (LENGTH, LENGTH + 1)
        found = np.bincount(view.segments)
        assert found[:-1].tolist() == of_segments[: len(found) - 1].tolist()


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
    assert load(config | {"transforms": ["shift_targets", {"grain_sft.transforms:ResetAtEod": {"eod_token_id": 7}}]})


def test_a_config_of_sources_with_different_layouts_must_state_transforms(config):
    del config["transforms"]
    assert "lacks the key 'transforms', and the layouts of its sources" in error_of(config)


def test_a_pickled_blend_is_small_and_opens_its_indices_again(config):
    layout = load(config).source.layout.parts["blend"]
    assert len(pickle.dumps(layout)) < 20_000 and repr(pickle.loads(pickle.dumps(layout))) == repr(layout)


BLEND_GOLDEN = golden_values("megatron_samples.json")["blends"]


@pytest.mark.parametrize("steps", [blending.STEPS, 0])
@pytest.mark.parametrize("name", BLENDS)
def test_blends_are_those_of_the_compiled_loop(name, steps, monkeypatch):
    """`blend` guesses the counts before each block, and corrects them in STEPS steps. With 0 steps, more blocks run again."""
    monkeypatch.setattr(blending, "STEPS", steps)
    found = blend(normalized(BLENDS[name]), BLEND_SIZE)
    indices = found.numbers_of(np.arange(BLEND_SIZE))
    assert hashlib.sha256(b"".join(each.astype("<i8").tobytes() for each in indices)).hexdigest()[:16] == BLEND_GOLDEN[name]
    assert found.counts.tolist() == np.bincount(indices[0], minlength=len(BLENDS[name])).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(3, 40))])
def test_a_blend_equals_a_loop_over_all_samples(seed):
    """The weights are random, small integers or powers of 2. The last two kinds give ties."""
    random = np.random.default_rng(seed)
    datasets, size = int(random.choice([1, 2, 5, 20, 90])), int(random.integers(2_000, 9_000))
    uniform = random.random(datasets) ** 6 + 1e-6  # without 1e-6, a weight may be almost 0
    kinds = uniform, random.integers(1, 9, datasets), 2.0 ** -random.integers(0, 9, datasets)
    weights = normalized(kinds[seed % len(kinds)])
    taken, expected = np.zeros(datasets), []
    for sample in range(size):
        # The next sample is from the data set that is furthest behind its share of the samples so far.
        expected.append(int(np.argmax(weights * max(sample, 1) - taken)))
        taken[expected[-1]] += 1
    for count in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, size):
        found = blend(weights, count)
        assert found.chosen.tolist() == expected[:count]
        rows = np.array([count - 1, 0, count // 2])
        numbers = [expected[:row].count(expected[row]) for row in rows]
        assert [each.tolist() for each in found.numbers_of(rows)] == [[expected[row] for row in rows], numbers]
    assert found.counts.tolist() == taken.tolist()
