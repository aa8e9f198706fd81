"""Documents end at each EOS token, or only at an EOS before a BOS.

The finder of documents reads the tokens in blocks and caches the documents. The size of a block does not change them.
"""

import numpy as np
import pytest
from batches import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import open_corpus
from grain_sft.corpus import content, document_finder
from grain_sft.errors import CorpusError

EOS, BOS = 1, 2


def documents_by_a_loop(files: list[list[int]], bos: int | None) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of each document, found by a plain loop over the tokens.

    If `bos` is None, every EOS ends a document. Else an EOS ends one only before `bos` or at the end of a file.
    """
    found, before = [], 0
    for tokens in files:
        start = 0
        for stop, token in enumerate(tokens, 1):
            if token == EOS and (bos is None or stop == len(tokens) or tokens[stop] == bos):
                found.append((before + start, stop - start))
                start = stop
        before += len(tokens)
    return found


@settings(max_examples=examples(150), deadline=None)
@given(
    files=st.lists(st.lists(st.sampled_from([EOS, EOS, BOS, BOS, 3, 4]), max_size=25), min_size=1, max_size=4),
    bos=st.sampled_from([None, BOS, EOS]),
    block=st.integers(1, 9),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "uint64"]),
)
def test_documents_do_not_depend_on_the_size_of_blocks(tmp_path_factory, files, bos, block, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_finder, "_CHUNK_BYTES", np.dtype(dtype).itemsize * block)
        paths = [tmp_path_factory.getbasetemp() / f"blocks-{number}.npy" for number in range(len(files))]
        for path, tokens in zip(paths, files, strict=True):
            np.array(tokens, dtype).tofile(path)
        corpus = open_corpus(paths, dtype=dtype, eos_token_id=EOS)
        start, length = corpus.find_documents(bos_token_id=bos).documents
        assert list(zip(start.tolist(), length.tolist(), strict=True)) == documents_by_a_loop(files, bos)
        assert corpus.num_documents == sum(tokens.count(EOS) for tokens in files)
        with pytest.raises(CorpusError, match="boundaries='bos': expected one of auto, eos"):
            corpus.find_documents("bos")


def test_a_scan_is_cached_until_the_tokens_or_the_ids_change(tmp_path, write_tokens, monkeypatch, calls_of, own_cache):
    """The three patches also cache small files and files that were just written."""
    monkeypatch.setattr(document_finder, "_CACHED_FROM", 0)
    monkeypatch.setattr(content, "_CACHED_FROM", 0)
    monkeypatch.setattr(content, "_SETTLED", -1)
    scans = calls_of(document_finder, "_scan")
    tokens = np.random.default_rng(0).integers(0, 5, 10_000)
    path = write_tokens("0.npy", tokens, "uint16")

    def found(eos=EOS, bos=None):
        finder = open_corpus(path, dtype="uint16", eos_token_id=eos).find_documents(bos_token_id=bos)
        return list(zip(*(each.tolist() for each in finder.documents), strict=True))

    first = found()
    assert found() == first == documents_by_a_loop([tokens.tolist()], None) and len(scans) == 1
    assert found(bos=BOS) != first and found(eos=3) != first and len(scans) == 3
    tokens[0] = EOS if tokens[0] != EOS else 4
    write_tokens("0.npy", tokens, "uint16")
    assert found() != first and len(scans) == 4
    for cached in (tmp_path / "cache" / "documents").glob("*.arrays"):
        cached.write_bytes(cached.read_bytes()[:-100])  # the next scan replaces the damaged file
    assert found() == found() == documents_by_a_loop([tokens.tolist()], None) and len(scans) == 5
