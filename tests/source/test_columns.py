"""A range of columns of a batch can be read alone if all rows have one length. Few bytes of other columns are read."""

import itertools

import grain
import numpy as np
import pytest
from batches import assert_same, golden_values, load, open_files, pipeline_of, sections
from sft_files import documents, write_episodes, write_olmo

from grain_sft import GrainSftError, NgramFilter, NpyDataSource, Pipeline, ShiftTargets, open_corpus
from grain_sft.integrations.context_order import ContextOrder
from grain_sft.layout import ColumnsLayout, MaterializedLayout, OlmoVslLayout, PackedLayout, WindowLayout
from grain_sft.pipeline.columns import cut_columns
from grain_sft.prepare.materialize import materialize
from grain_sft.storage.activity import counts
from grain_sft.transforms import DropLastPosition

LENGTH, ROWS = 64, 4
ORDERS = golden_values("context_order.json")["runs"]
LAYOUTS = {kind: {"kind": kind} for kind in ("windows", "padded", "packed")} | {
    "fragments": {"kind": "packed", "long_documents": "fragment"},
    "many segments": {"kind": "packed", "algorithm": "first_fit_decreasing", "sequence_length": 512},
    "long": {"kind": "packed", "sequence_length": 4096},  # read segment by segment
    "long padded": {"kind": "padded", "sequence_length": 2048},
    "megatron": {"kind": "megatron_gpt", "eod_mask_loss": True, "sequence_length": 24},
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    docs, weighted = documents(150, seed=3, longest=90), documents(120, 5, weights=True, longest=90)
    long = documents(60, 7, longest=3000)
    for name, each in (("plain", docs), ("long plain", long)):
        (folder / name).mkdir()
        np.concatenate([tokens for tokens, _ in each]).tofile(folder / name / "0.npy")
    write_olmo(folder / "masks", docs, part_tokens=500)
    write_episodes(folder / "weights", weighted, shards=3)
    write_episodes(folder / "long", long, shards=2)
    dtypes, episodes = {"masks": "uint16", "plain": "uint32", "long plain": "uint32"}, ("weights", "long")
    found = {name: {"path": str(folder / name), "eos_token_id": 2, "dtype": dtype} for name, dtype in dtypes.items()}
    found |= {name: {"path": str(folder / name)} for name in episodes}
    return found | {"mixture": {"mixture": {name: {"weight": 1, **found[name]} for name in ("masks", "weights")}}}


def config_of(corpus, layout, **own):
    sampler = {"seed": 1, "global_batch_size": ROWS, **own.pop("sampler", {})}
    if layout != "megatron":
        sampler = {"order": "olmo", **sampler}
    return {"corpus": corpus, "layout": {"sequence_length": LENGTH, **LAYOUTS[layout]}, "sampler": sampler} | own


def opened(corpus):
    options = dict(corpus)
    return open_corpus(options.pop("path"), **options)


def assert_columns(pipeline, steps):
    """Check that fixed and random ranges of columns equal those of whole rows, if three rows or no rows are read."""
    random = np.random.default_rng(0)
    for step in steps:
        whole = pipeline[step]
        width = whole["inputs"].shape[1]
        cuts = [(0, width), (0, 1), (width - 1, width), (width // 2, width), (width // 4, width // 2)]
        cuts += [tuple(sorted(random.choice(width + 1, 2, replace=False).tolist())) for _ in range(4)]
        some = random.permutation(len(whole["inputs"]))[:3]
        for slots, (start, stop) in [*((some, cut) for cut in cuts), (some[:0], cuts[0]), (some[:0], cuts[4])]:
            expected = {key: array[slots, start:stop] for key, array in whole.items()}
            assert_same(pipeline.read(step, slots, columns=(start, stop)), expected)


FILL = {"sampler": {"epochs": 1, "last_batch": "fill"}}
MASKED = {"transforms": [{"mask_eod": {"eod_token_id": 2, "as_target": False}}, "shift_targets", "drop_last_position"]}


def withdrawing(num_documents):
    """Withdraw every second document from step 2 on, and documents 1 and 3 from step 9 on."""
    withdrawn = ((2, list(range(0, num_documents, 2))), (9, [1, 3]))
    return {"amendments": [{"withdraw": {"from": step, "documents": numbers}} for step, numbers in withdrawn]}


SHORT = itertools.product(("masks", "weights"), ("windows", "padded", "packed", "fragments", "many segments"))
LONG = itertools.product(("long", "long plain"), ("long", "long padded"))
CASES = [
    *((*each, {}, (0, 2)) for each in [*SHORT, *LONG, ("plain", "megatron"), ("plain", "packed")]),
    *(("mixture", "packed", {}, (0, 5)), ("plain", "padded", FILL, (-1,)), ("plain", "windows", MASKED, (0, 2))),
    *(("masks", layout, withdrawing(150), (1, 3, 9)) for layout in ("windows", "packed", "padded")),
    *(("long", "long padded", withdrawing(60), (1, 3, 9)), ("plain", "megatron", withdrawing(150), (1, 3, 9))),
]
"""Corpus, layout, other sections of the config, and steps. Step -1 is the last step."""


@pytest.mark.parametrize(("corpus", "layout", "own", "steps"), CASES)
def test_columns_are_those_of_whole_rows(corpora, corpus, layout, own, steps):
    pipeline = load(config_of(corpora[corpus], layout, **own))
    assert pipeline.reads_columns
    # The last batch of a case with FILL is not full, and a case with amendments has withdrawn documents at step 3.
    assert own is not FILL or len(pipeline.source) % ROWS
    assert "amendments" not in own or (pipeline[3]["inputs_segmentation"] == 0).any()
    assert_columns(pipeline, [step % pipeline.end_step for step in steps])


def test_columns_of_materialized_rows_are_those_of_whole_rows(corpora, tmp_path):
    for name in ("masks", "weights", "plain"):
        materialize(PackedLayout(opened(corpora[name]), LENGTH), tmp_path / name)
        assert_columns(pipeline_of(MaterializedLayout(open_corpus(tmp_path / name)), global_batch_size=ROWS), [0])


@pytest.mark.parametrize("layout", ["windows", "long"])  # long rows are read segment by segment
def test_columns_are_read_from_the_files_that_whole_rows_have_opened(corpora, layout):
    pipeline = load(config_of(corpora["long"], layout))
    width = pipeline[0]["inputs"].shape[1]
    before = open_files(corpora["long"]["path"])
    assert before
    for start in range(0, width // 2, width // 8):
        pipeline.read(0, np.arange(2), columns=(start, start + width // 2))
    assert open_files(corpora["long"]["path"]) == before


class NumTargets(ShiftTargets):
    """A user's transform that adds one value for each row, and a number."""

    def map(self, element):
        element = super().map(element)
        return {"num_targets": element["targets_segmentation"].sum(axis=1), **element, "scale": 0.5}


def test_an_array_of_one_value_a_row_is_returned_whole(corpora):
    pipeline = pipeline_of(WindowLayout(opened(corpora["masks"]), LENGTH), [NumTargets()], global_batch_size=ROWS)
    whole, part = pipeline[0], pipeline.read(0, np.arange(ROWS), columns=(8, 24))
    np.testing.assert_array_equal(part["num_targets"], whole["num_targets"])
    np.testing.assert_array_equal(part["inputs"], whole["inputs"][:, 8:24])
    assert list(cut_columns({"num_targets": part["num_targets"]}, 8, 8, 24)) == ["num_targets"]
    shorter = DropLastPosition().map(whole | {"logits": np.zeros((ROWS, LENGTH, 3))})
    shapes = {name: array.shape for name, array in shorter.items() if name in ("num_targets", "inputs", "logits")}
    assert shapes == {"num_targets": (ROWS,), "inputs": (ROWS, LENGTH - 1), "logits": (ROWS, LENGTH - 1, 3)}


class Backwards(ShiftTargets):
    """A user's transform that does not state which columns it needs."""

    def map(self, element):
        return {key: array[:, ::-1] for key, array in super().map(element).items()}


@pytest.mark.parametrize("transforms", [[NgramFilter(max_count=3), ShiftTargets()], [Backwards()]])
def test_transforms_that_need_whole_rows_get_them(corpora, transforms):
    pipeline = pipeline_of(WindowLayout(opened(corpora["plain"]), LENGTH), transforms)
    assert not pipeline.reads_columns
    assert_columns(pipeline, (0,))


class Same(grain.transforms.Map):
    column_reach = (0, 0)  # a column depends only on the same column

    def map(self, element):
        return element


@pytest.mark.parametrize("layout", ["windows", "packed", "padded"])
@pytest.mark.parametrize("length", [1 << 17, 1 << 20])
def test_few_bytes_are_read_besides_those_of_the_columns(tmp_path, layout, length):
    tokens = np.random.default_rng(0).integers(1, 60_000, 3 * length, np.uint16)
    tokens[length // 3 :: length // 3] = 0
    tokens[-1] = 0
    tokens.tofile(tmp_path / "0.npy")
    corpus = {"eos_token_id": 0, "dtype": "uint16"}
    config = sections(tmp_path, length, corpus=corpus, layout=layout, global_batch_size=2)
    whole = load(config | {"transforms": ["shift_targets"]})
    pipeline = Pipeline(whole.source, whole.sampler, [Same(), *whole.transforms])
    for shards in (2, 4):
        width = length // shards
        for shard in range(shards):
            before = counts["local_bytes"]
            pipeline.read(0, np.arange(2), columns=(shard * width, (shard + 1) * width))
            assert counts["local_bytes"] - before <= 2 * width * 2 * 1.1  # 2 rows, 2 bytes a token, and 10 % more


@pytest.mark.parametrize("run", ORDERS)
def test_the_load_balanced_order_is_that_of_maxtext(run):
    """Run "2 x 16" has 2 shards of devices and rows of 16 tokens. Equal parts of the order join to the whole order."""
    shards, length = map(int, run.split(" x "))
    order, columns = ContextOrder(shards), np.arange(length)
    for parts in (1, 2, length // 2, length):
        found = []
        for part in range(parts):
            sources = order.sources(part * length // parts, (part + 1) * length // parts, length)
            found += [columns[slice(*each)] for each in sources]
        assert np.concatenate(found).tolist() == ORDERS[run]


@pytest.mark.parametrize("columns", [(0, 0), (5, 3), (-1, 4), (1.5, 3), (0, LENGTH + 1), (LENGTH, LENGTH + 1)])
def test_columns_that_do_not_exist_are_refused(corpora, columns):
    pipeline = load(config_of(corpora["plain"], "windows"))
    expected = f"expected (0 <= start < stop <= {LENGTH}|an integer)"
    with pytest.raises(GrainSftError, match=expected):
        pipeline.read(0, np.arange(2), columns=columns)
    with pytest.raises(GrainSftError, match=expected):
        pipeline.source.columns(*columns)


@pytest.mark.parametrize("kind", [WindowLayout, PackedLayout])
def test_columns_of_columns_are_those_of_whole_rows(corpora, kind):
    """Columns 4 to 20 of columns 8 to 40 are columns 12 to 28."""
    source = NpyDataSource(kind(opened(corpora["plain"]), LENGTH))
    rows = np.arange(len(source))
    assert_same(source.columns(8, 40).columns(4, 20).read(rows), source.columns(12, 28).read(rows))


def test_columns_of_rows_of_several_lengths_are_refused(corpora):
    with pytest.raises(GrainSftError, match="expected rows of one length"):
        NpyDataSource(OlmoVslLayout(opened(corpora["plain"]), 32, min_sequence_length=8)).columns(0, 16)


def test_a_layout_of_columns_has_the_costs_and_segments_of_its_columns(corpora):
    whole = PackedLayout(opened(corpora["plain"]), LENGTH, boundaries="eos")
    layout = ColumnsLayout(whole, 20, 50)
    rows = NpyDataSource(whole).columns(20, 50).read(range(len(whole)))["segment_ids"]
    counts = [np.unique(row[row > 0], return_counts=True)[1] for row in rows]
    assert layout.row_costs().tolist() == [int((each**2).sum()) for each in counts]
    assert layout.statistics["segments"] == sum(map(len, counts))
    assert layout.sources is whole.sources
