"""Commands accept layouts, orders and other entries that another package defines. Here, that package is `tests/plugin`."""

import functools
import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from batches import assert_one_run, load, take, write_config
from prepared import chat
from python_runs import run_python
from sft_files import documents
from tokenizer_makers import byte_level_json, save_huggingface

import grain_sft
from grain_sft import Host, NpyDataSource, PackedLayout
from grain_sft.errors import LayoutError, SamplerError
from grain_sft.layout import Layout, PackingAlgorithm
from grain_sft.prepare import Dataset, Request, load_tokenizer, prepare
from grain_sft.sampling import ORDERS

LENGTH, PAIR, PLUGIN = 32, np.arange(2), Path(__file__).parent / "plugin"
MASKED = {"tokens": {"high": [*range(950, 1000)], "low": [3]}, "share": 0.5}


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))  # workers and commands import the plugin too
    monkeypatch.setenv("GRAIN_SFT_EXAMPLE_STEPS", str(tmp_path / "steps.txt"))


LAYOUTS = {
    "layout": {"kind": "grain_sft_example.layouts:OverlappingWindows", "stride": 12, "sequence_length": LENGTH},
    "packing": {"kind": "packed", "algorithm": "grain_sft_example.packing:next_fit", "sequence_length": LENGTH},
}


def config(folder: Path, layout: str = "layout") -> dict:
    """Return a config that uses an entry of the plugin in every section. The first call writes its corpus."""
    articles = folder / "articles"
    if not articles.exists():
        articles.mkdir()
        for number in range(2):
            tokens = [each for each, _ in documents(150, seed=number)]
            lengths = np.array([len(each) for each in tokens])
            np.concatenate(tokens).astype("<u2").tofile(articles / f"{number}.tok")
            np.stack([lengths.cumsum() - lengths, lengths], 1).astype("<u8").tofile(articles / f"{number}.pairs")
    return {
        "corpus": {"path": str(articles), "format": "grain_sft_example.formats:Articles"},
        "layout": LAYOUTS[layout],
        "sampler": {"order": "grain_sft_example.orders:evens_first", "seed": 3, "global_batch_size": 12},
        "transforms": ["ngram_filter", "shift_targets", {"grain_sft_example.transforms:MaskTokens": MASKED}],
        "observers": ["grain_sft_example.observers:StepFile"],
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_are_the_same_for_any_hosts_after_a_resume_and_with_workers(tmp_path, layout):
    stated, workers = config(tmp_path, layout), int(layout == "layout")
    assert_one_run(lambda host: load(stated, host=host), range(2, 6), hosts=(3,), worker_count=workers)
    assert (tmp_path / "steps.txt").read_text().split() == ["2", "3", "4", "5"] * (5 + workers)


def test_rows_and_loss_equal_those_of_a_naive_computation(tmp_path):
    pipeline = load(config(tmp_path))
    tokens = [np.fromfile(tmp_path / "articles" / f"{number}.tok", "<u2") for number in range(2)]
    windows = [each[first : first + LENGTH] for each in tokens for first in range(0, len(each) - LENGTH + 1, 12)]
    count = len(windows)
    order = np.roll([*range(0, count, 2), *range(1, count, 2)], 3)[:12]
    np.testing.assert_array_equal(pipeline[0]["inputs"], np.stack([windows[row] for row in order]))
    masked = np.isin(pipeline[0]["targets"], [3, *range(950, 1000)])
    assert masked.any() and not pipeline[0]["targets_segmentation"][masked].any()


def test_a_change_of_an_option_or_a_transform_changes_the_receipt(tmp_path):
    stated = config(tmp_path)
    (ran := load(stated))[0]  # changes an attribute of `MaskTokens`
    assert ran.receipt == load(stated, host=Host(1, 2)).receipt
    changes = [{"layout": stated["layout"] | {"stride": 13}}, {"sampler": stated["sampler"] | {"seed": 4}}]
    for other in (*changes, {"transforms": stated["transforms"][:2]}):
        assert str(load(stated | other).receipt) != str(ran.receipt)


def corpus_of(folder: Path) -> grain_sft.Corpus:
    return grain_sft.open_corpus(folder / "articles", format=config(folder)["corpus"]["format"])


WRONG_PIECES = [
    ({"length": LENGTH + 1}, "ends after the row of 32"),
    ({"start": 10**9}, "is not in the file"),
    ({"shard": 2}, "is not in the file"),
    ({"column": 1}, "does not begin where the piece before it ends"),
    ({"length": LENGTH - 1}, "rows with padding need the columns `segment` and `position`"),
    ({"segment": 0, "position": 0}, "skips a segment"),
    ({"row": 3}, "is of another row"),
    ({"segment": 1}, "only one of the columns `segment` and `position`"),
    ({"row": 0 * PAIR, "column": PAIR, "length": 1, "segment": PAIR + 1, "position": 0}, "is of a second segment, but `one_"),
    ({"row": 0 * PAIR, "column": PAIR, "length": 1, "segment": 1, "position": 0}, "does not continue the positions of"),
    ({"start": 1.5}, "Expected int64 columns of one length"),
    ({"start": np.zeros((2, 1), np.int64)}, "columns of shapes"),
    ({"start": np.zeros(1, np.int64)}, "Expected int64 columns of one length"),
    ({"document": 0}, "names a document, but `follows_documents` is not set"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_PIECES)
def test_wrong_pieces_of_a_layout_are_refused(tmp_path, changed, message):
    from grain_sft_example.layouts import OverlappingWindows

    class Wrong(OverlappingWindows):
        def pieces(self, rows):
            columns = {name: each if np.ndim(each) else np.full(len(rows), each) for name, each in changed.items()}
            return super().pieces(rows)._replace(**columns)

    with pytest.raises(LayoutError, match=rf"Wrong\.pieces: .*{message}"):
        NpyDataSource(Wrong(corpus_of(tmp_path), LENGTH)).read([0, 1])


def test_a_subclass_of_our_layout_reads_its_own_pieces_and_has_its_own_receipt(tmp_path):
    class Backwards(PackedLayout):
        def pieces(self, rows):
            assert len(rows)
            return super().pieces(len(self) - 1 - rows)

    corpus = corpus_of(tmp_path)
    own, ours = Backwards(corpus, 4 * LENGTH), PackedLayout(corpus, 4 * LENGTH)
    tokens = NpyDataSource(ours).read([len(ours) - 1, 0])["tokens"]
    np.testing.assert_array_equal(NpyDataSource(own).read([0, len(own) - 1])["tokens"], tokens)
    assert own.receipt["layout"] != ours.receipt["layout"] and repr(own) != repr(ours)
    assert own.row_segments is None and not len(own.pieces(np.arange(0)).row)
    own.option = 3
    assert cloudpickle.loads(cloudpickle.dumps(own)).option == 3  # as in a worker process


WRONG_MEMBERS = [
    ({"__len__": Layout.__len__}, "Wrong has no method `__len__`"),
    ({"pieces": Layout.pieces}, "Wrong has no method `pieces`"),
    ({"__len__": lambda self: -1}, "layout test_plugin:Wrong: ValueError: .*Fix its code"),
    ({"__len__": lambda self: 0}, r"layout test_plugin:Wrong: __len__\(\)=0: expected an integer, 1 or more"),
    ({"__len__": lambda self, calls=[]: calls.append(0) or len(calls)}, r"__len__\(\) is 1, then 2. Return one number"),
    ({"__init__": lambda *arguments: None}, "layout test_plugin:Wrong: AttributeError: .* 'corpus'. Fix its code"),
    ({"width": lambda self, rows: LENGTH // 2}, "ends after the row of 16"),
    ({"row_lengths": (LENGTH,), "row_counts": (3,)}, r"row_counts=\(3,\): expected \d+ rows of all row_lengths"),
    ({"pieces": lambda self, rows: 1 // 0}, "test_plugin:Wrong.pieces: ZeroDivisionError: .*Fix its code"),
    ({"pieces": lambda self, rows: np.load("/no/file")}, "test_plugin:Wrong.pieces: FileNotFoundError: .*Fix its code"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_MEMBERS)
def test_the_error_of_a_layout_that_lacks_a_method_or_raises_names_the_layout(tmp_path, changed, message):
    from grain_sft_example.layouts import OverlappingWindows

    members = {name: vars(OverlappingWindows)[name] for name in ("__init__", "__len__", "pieces")}
    layout = type("Wrong", (Layout,), members | changed)(corpus_of(tmp_path), LENGTH)
    with pytest.raises(LayoutError, match=message):
        NpyDataSource(layout).read([0])


WRONG_ROWS = [
    (lambda rows: rows._replace(document=rows.document * 0), "tokens past the end of a document"),
    (lambda rows: rows._replace(document=rows.document // 2 * 2, length=rows.length * 0 + 1), "a token twice"),
    (lambda rows: rows._replace(document=rows.document - 1), "a document that does not exist"),
    (lambda rows: rows._replace(document=rows.document + 100), "a document that does not exist"),
    (lambda rows: rows._replace(ends=rows.ends[-1:]), "a row of more than 32 tokens"),
    (lambda rows: rows._replace(ends=np.append(0, rows.ends)), "a row without pieces"),
    (lambda rows: rows._replace(ends=np.append(rows.ends, rows.ends[-1])), "a row without pieces"),
    (lambda rows: rows._replace(length=rows.length * 1.0), "Expected int64 columns"),
    (lambda rows: None, "Expected int64 columns"),
    (lambda rows: rows._replace(document=rows.document[:1], offset=rows.offset[:1]), "columns of the shapes"),
    (lambda rows: rows._replace(ends=rows.ends[:0]), "`ends` up to 0, but 150 as the number of pieces"),
    (lambda rows: rows._replace(ends=rows.ends[::-1] + 1), "`ends` up to .*, but 150 as the number of pieces"),
    (lambda rows: rows._replace(length=rows.document * 0 + 1, ends=np.arange(5, 155, 5)), "than max_segments=3"),
    (lambda rows: rows, "a last batch of fewer than 1000 rows"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ROWS)
def test_wrong_rows_of_a_packing_algorithm_are_refused(tmp_path, monkeypatch, change, message):
    from grain_sft_example import packing

    pack = packing.next_fit
    monkeypatch.setattr(packing, "next_fit", PackingAlgorithm(lambda *each: change(pack(*each)), whole_batches=True))
    options = {"algorithm": LAYOUTS["packing"]["algorithm"], "max_segments": 3, "batch_rows": 1000}
    with pytest.raises(LayoutError, match=rf"next_fit: .*{message}"):
        PackedLayout(corpus_of(tmp_path), LENGTH, **options, cache_dir=tmp_path)


def test_an_edited_algorithm_packs_again_and_one_that_fails_to_import_is_an_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    pack = "def pack(*args):\n import dataclasses, grain_sft_example.packing as own\n return own.next_fit(args[0], {})"
    counts = []
    # the second edit raises SystemExit on import
    for number, options in enumerate(("args[1]", "dataclasses.replace(args[1], max_segments=1)", "0)\nexit(")):
        (tmp_path / "edited.py").write_text(pack.format(options) + " " * number)
        importlib.invalidate_caches()
        sys.modules.pop("edited", None)
        with pytest.raises(LayoutError, match="'edited:pack' cannot be imp") if number == 2 else nullcontext():
            layout = PackedLayout(corpus_of(tmp_path), LENGTH, algorithm="edited:pack", cache_dir=tmp_path)
            assert layout.data_key.endswith(f"rows={layout.receipt['layout']})")  # so a run's state fits only its rows
            counts.append(len(layout))
    assert counts[0] < counts[1]
    monkeypatch.delattr("__main__.__file__", raising=False)  # as in a notebook
    own = "type('Own', (), {{'n': {}, '__module__': '__main__'}})"
    codes = ("lambda: {}", "lambda n={}: n", "(lambda n: lambda: n)({})", "functools.partial(min, {})", own, own + "()")
    entries = [eval(code.format(n), {"__name__": "no file", "functools": functools}) for code in codes for n in (0, 0, 1)]
    assert len({grain_sft.registry.code_sha256(*each) for entry in entries for each in ((entry,), (max, entry))}) == 24


@pytest.mark.parametrize("layout", LAYOUTS)
def test_commands_accept_a_config_with_an_entry_of_the_plugin_in_every_section(tmp_path, monkeypatch, layout, run_command):
    monkeypatch.chdir(tmp_path)
    path = write_config(Path("config.json"), config(tmp_path, layout) | {"audit": "audit"})
    take(load(path), 0, 6)
    commands = ["receipt {}", "verify {}", "inspect {} --step 1", "trace {} --steps 0:4", "audit-check audit.log {}"]
    for command in (*commands, "report {} --output report.html"):
        run_command(*command.format(path).split())
    if layout == "layout":
        run_python("-m", "grain_sft", "bench", path, "--seconds", "0.2")


@pytest.fixture
def chats(tmp_path):
    save_huggingface(tmp_path / "hf", byte_level_json(("<|im_start|>", "<|im_end|>")), eos="<|im_end|>")
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat("two?", "yes, two")) + "\n")
    return tmp_path / "chats.jsonl"


def test_a_template_from_outside_prepares_a_corpus(tmp_path, chats):
    name = "grain_sft_example.templates:SHOUTING"
    prepare(Request((Dataset((str(chats),)),), name, str(tmp_path / "hf"), "olmo", val_frac=0.0), tmp_path / "out", workers=1)
    corpus = grain_sft.open_corpus(tmp_path / "out")
    assert "YES, TWO" in load_tokenizer(str(tmp_path / "hf")).decode(next(corpus.iter_documents()).tokens.tolist())


def test_a_format_from_outside_is_written_and_masks_that_it_cannot_hold_are_refused(tmp_path, run_command):
    tokens = np.array([5, 6, 7, 2, 8, 9, 2], "<u2")
    tokens.tofile(tmp_path / "token_ids_part_0000.npy")
    convert = ["convert", str(tmp_path), "--dtype", "uint16", "--eos-token-id", "2", "-o"]
    convert += [str(tmp_path / "out"), "--format", "grain_sft_example.formats:WRITER"]
    run_command(*convert)
    written = grain_sft.open_corpus(tmp_path / "out" / "train", format="grain_sft_example.formats:Articles")
    assert written.read(0, 7)[0].tolist() == tokens.tolist() and written.documents.length.tolist() == [4, 3]
    (tmp_path / "labels_mask_part_0000.npy").write_bytes(bytes([0, 1, 1, 1, 1, 1, 1]))
    assert "1 of 7 tokens of train take no loss" in run_command(*convert, "--overwrite", status=1).err
    expected = "format 'grain_sft_example.broken:plain' is a function; expected Format. Fix the name."
    assert expected in run_command(*convert[:-1], "grain_sft_example.broken:plain", status=1).err
    assert "format 'articles': expected one of olmo, " in run_command(*convert[:-1], "articles", status=1).err


BROKEN = {
    "transforms": (lambda name: {"transforms": [name]}, "Map", "transform"),
    "observers": (lambda name: {"observers": [name]}, "Observer", "observer"),
    "layout": (lambda name: {"layout": {"kind": name, "sequence_length": LENGTH}}, "Layout", "layout kind"),
    "corpus": (lambda name: {"corpus": {"format": name}}, "Format", "corpus format"),
}


@pytest.mark.parametrize("section", BROKEN)
@pytest.mark.parametrize("entry", ["Raising", "Plain", "plain"])
def test_an_entry_that_cannot_be_made_is_an_error_that_names_the_config_and_the_entry(tmp_path, run_command, section, entry):
    change, base, noun = BROKEN[section]
    name = f"grain_sft_example.broken:{entry}{base if entry == 'Raising' else ''}"
    stated = config(tmp_path)
    changes = {key: stated[key] | each if key == "corpus" else each for key, each in change(name).items()}
    path = write_config(tmp_path / "config.json", stated | changes)
    message = run_command("receipt", path, status=1).err
    assert message.startswith(f"grain-sft receipt: {path}: ") and f"{noun} {name!r} " in message
    if entry == "Raising":
        assert "KeyError: 'no such language' (" in message and "broken.py:22). Fix its options, or its code." in message
    else:
        assert "is of class Plain; expected a subclass of " in message and f"'s {base}. Derive it from that." in message


def test_a_template_that_cannot_be_made_is_an_error(tmp_path, chats, run_command):
    for template, expected in (
        ("RaisingTemplate", "can't be made: KeyError: 'no such language'"),
        ("CutTemplate", ": truncation='middle': expected one of first, last."),
        ("NoneTemplate", ": a result is None (NoneType); expected a Rendered or a RecordError."),
        ("Plain", "is of class Plain; expected a subclass of grain_sft's Template. Derive"),
        ("plain", "is a function; expected a class or str. Fix the name."),
    ):
        name = f"grain_sft_example.broken:{template}"
        command = ["prepare", chats, "--template", name, "--tokenizer", tmp_path / "hf"]
        message = run_command(*command, "--val-frac", "0", "--workers", "1", "-o", tmp_path / "out", status=1).err
        assert message.replace("'", "").startswith(f"grain-sft prepare: template {name}") and expected in message


def test_a_function_of_other_arguments_is_refused_as_an_order_and_as_an_algorithm(tmp_path):
    with pytest.raises(SamplerError, match=r"getattr.*, epoch 0: TypeError: .* Expected a function of \(seed, epoch, "):
        ORDERS["builtins:getattr"].make(8, seed=1, cache_dir=None)(0, np.arange(8))
    with pytest.raises(LayoutError, match=r"algorithm builtins:getattr: TypeError: .* Expected a function of lengths"):
        PackedLayout(corpus_of(tmp_path), LENGTH, algorithm="builtins:getattr", cache_dir=tmp_path)
