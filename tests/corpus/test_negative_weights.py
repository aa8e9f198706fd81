"""A negative or infinite weight of the loss is refused wherever it is read, with its file and its token."""

import numpy as np
import pytest
from sft_files import documents, write_episodes

from grain_sft import NpyDataSource, PackedLayout, PaddedLayout, open_corpus
from grain_sft.errors import CorpusError
from grain_sft.layout import MaterializedLayout
from grain_sft.prepare.materialize import materialize

BAD = pytest.mark.parametrize("value", [-0.25, -np.inf, np.inf, np.nan])


def set_value(path, place, value):
    weights = np.fromfile(path, np.float32)
    weights[place] = value
    weights.tofile(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    return write_episodes(tmp_path / "corpus", documents(3000, weights=True), flat=True) / "train"


@BAD
@pytest.mark.parametrize("layout", [PaddedLayout, PackedLayout])
def test_a_bad_weight_is_refused_when_its_row_is_read(folder, layout, value):
    set_value(folder / "mask_weighted.bin", 20_000, value)  # far from the ends, which opening reads
    source = NpyDataSource(layout(open_corpus(folder), 64))
    with pytest.raises(
        CorpusError, match=r"mask_weighted.bin: the weight of token 20000 is .*finite number, 0 or more"
    ):
        source.read(range(len(source)))


@BAD
def test_a_bad_weight_at_an_end_is_refused_when_the_corpus_is_opened(folder, value):
    set_value(folder / "mask_weighted.bin", 5, value)
    with pytest.raises(CorpusError, match="expected a finite weight, 0 or more"):
        open_corpus(folder)


@BAD
def test_a_bad_weight_of_written_rows_is_refused(folder, tmp_path, value):
    materialize(PackedLayout(open_corpus(folder), 64), str(tmp_path / "rows"))
    corpus = open_corpus(tmp_path / "rows")
    set_value(corpus.shards[0].loss.path, 20_000, value)
    source = NpyDataSource(MaterializedLayout(corpus))
    with pytest.raises(CorpusError, match="is negative or not finite"):
        source.read(range(len(source)))
