"""For notebooks, objects have HTML tables, data frames and lengths, and `dir` lists the public names."""

import importlib
import operator
import sys
from xml.etree import ElementTree

import numpy as np
import pandas
import pytest
from batches import load, pipeline_of, sections
from sft_files import EOS, documents, write_olmo

import grain_sft
from grain_sft import PaddedLayout, WindowLayout
from grain_sft.errors import GrainSftError, MissingExtraError, PipelineError, RowIndexError
from grain_sft.html_table import html_columns, html_facts
from grain_sft.layout import MaterializedLayout, MixtureLayout
from grain_sft.prepare import materialize
from grain_sft.provenance import trace


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    write_olmo(folder / "<corpus>", documents(200), part_tokens=10**9, sources=True)
    return load(sections(folder / "<corpus>", 64, corpus={"dtype": "uint16", "eos_token_id": EOS}))


def text_of(html):
    return " ".join(ElementTree.fromstring(html).itertext())


def test_each_object_has_a_short_table(pipeline, tmp_path):
    layout = pipeline.source.layout
    lines = trace(pipeline, range(3))
    materialize(layout, str(tmp_path / "rows"))
    for thing, expected in (
        (layout.corpus, f"{layout.corpus.num_tokens:,}"),
        (layout, f"{len(layout):,}"),
        (PaddedLayout(layout.corpus, 64), "PaddedLayout"),
        (WindowLayout(layout.corpus, 64), "WindowLayout"),
        (MaterializedLayout(grain_sft.open_corpus(tmp_path / "rows")), "MaterializedLayout"),
        (MixtureLayout({"a": layout, "b": layout}), "MixtureLayout"),
        (pipeline, "4 rows of 64 tokens"),
        (pipeline.receipt, pipeline.receipt.code),
        (lines, f"{len(lines):,} lines, the first 10"),
    ):
        html = thing._repr_html_()
        assert expected in text_of(html), thing
        assert len(html) < 5000 and "<corpus>" not in html


def test_tables_escape_their_texts_and_cut_long_ones():
    html = html_facts("<a>", {"<b>": "<c>" * 100, "left out": None, "count": 12345})
    assert "left out" not in html and "12,345" in html and len(html) < 1000
    assert "<a>" in text_of(html) and "<b>" in text_of(html)
    assert text_of(html_columns("t", {"x": [1, 2], "y": ["<", "&"]})).split() == ["t", "x", "y", "1", "<", "2", "&"]


def test_show_prints_rows_of_a_step(pipeline, capsys):
    pipeline.show(2)
    one = capsys.readouterr().out
    assert "step 2, epoch 0, row 0" in one and "row 1," not in one and "take loss" in one
    assert "ids are shown" in one  # because there is no tokenizer
    for step, rows, expected in ((2, 3, "row 2,"), (0, [3], "step 0, epoch 0, row 3"), (0, 1000, "row 3,")):
        pipeline.show(step, rows=rows)
        assert expected in capsys.readouterr().out
    for wrong, error in (({"rows": [4]}, RowIndexError), ({"step": -1}, RowIndexError), ({"rows": 0}, PipelineError)):
        with pytest.raises(error):
            pipeline.show(**wrong)


def test_a_trace_is_a_data_frame_and_without_pandas_the_error_names_the_extra(pipeline, monkeypatch):
    lines = trace(pipeline, range(3))
    frame = lines.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == len(lines)
    for name, column in lines.columns().items():
        expected = [lines.source_names[number] for number in lines.source] if name == "source" else column
        np.testing.assert_array_equal(frame[name], expected)
    assert frame["path"].tolist() == [lines.paths[number] for number in lines.shard]
    trained = [int((pipeline[step]["targets_segmentation"] != 0).sum()) for step in range(3)]
    assert frame.groupby("step")["trainable"].sum().tolist() == trained
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"Trace.to_pandas needs pandas, .*\[pandas\]"):
        lines.to_pandas()


def test_a_pipeline_has_an_exact_length_unless_it_is_endless(pipeline):
    two = pipeline_of(pipeline.source.layout, epochs=2)
    assert len(two) == two.num_steps == two.end_step == 2 * (len(pipeline.source) // 4)
    assert operator.length_hint(two) == len(two) == len(list(two.iter()))
    assert pipeline.num_steps is None and pipeline.end_step == sys.maxsize
    with pytest.raises(TypeError, match="never ends, so it has no length") as found:
        len(pipeline)
    assert isinstance(found.value, GrainSftError)
    assert pipeline and two
    assert len(pipeline.dataset()) == sys.maxsize  # Grain's data sets need a length


def test_dir_lists_public_names_and_public_packages():
    names = dir(grain_sft)
    assert set(grain_sft.__all__) <= set(names)
    for name in names:
        assert getattr(grain_sft, name) is not None
        if name not in grain_sft.__all__:
            assert importlib.import_module(f"grain_sft.{name}").__doc__
    private = {"Any", "TYPE_CHECKING", "importlib", "annotations", "_PLACES", "bench", "cli", "demo", "files"}
    assert not private & set(names)
