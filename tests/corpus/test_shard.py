"""Token files: their content decides whether they are raw or .npy. A damaged file, or one of another kind, is refused."""

import os
import struct

import numpy as np
import pytest
import sft_files
from python_runs import run_python
from sft_files import NPY_MAGIC as MAGIC
from sft_files import npy_bytes

from grain_sft import NpyDataSource, WindowLayout, open_corpus

DTYPES = ("uint8", "uint16", "uint32", "uint64")


def write_npy(path, array, version=None):
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version=version, allow_pickle=False)
    return path


def header_of(shape, descr="'<u4'"):
    """Return the text of a .npy header. `shape` and `descr` are inserted as they are."""
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


def read_all(path, **options):
    corpus = open_corpus([path], **options)
    return NpyDataSource(WindowLayout(corpus, corpus.num_tokens))[0]["tokens"]


def error_of(path, **options):
    message = sft_files.error_of([path], **options)
    assert str(path) in message
    return message


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_raw_files_and_headers_of_any_version_are_read_whatever_their_names(tmp_path, version, dtype):
    tokens = np.arange(200).astype(dtype)
    for name in ("a.npy", "a.bin", "a.raw", "a"):
        path = tmp_path / name
        tokens.tofile(path)
        np.testing.assert_array_equal(read_all(path, dtype=dtype), tokens)
        write_npy(path, tokens, version)
        corpus = open_corpus(path)
        (shard,) = corpus.shards
        assert (shard.num_tokens, shard.size, corpus.dtype) == (200, os.path.getsize(path), np.dtype(dtype))
        assert shard.data_offset == shard.size - tokens.nbytes
        for options in ({}, {"dtype": dtype}):
            np.testing.assert_array_equal(read_all(path, **options), tokens)


def test_a_header_with_9000_bytes_of_padding_is_skipped_whole(tmp_path):
    tokens, path = np.arange(5000, dtype=np.uint16), tmp_path / "a.npy"
    header = header_of("(5000,)", "'<u2'").replace("False", "True")  # fortran_order has no effect on one dimension
    path.write_bytes(npy_bytes(header + " " * 9_000 + "\n", tokens.tobytes()))
    np.testing.assert_array_equal(read_all(path), tokens)
    assert open_corpus(path).shards[0].digest == open_corpus(write_npy(tmp_path / "b.npy", tokens)).shards[0].digest


def test_threads_that_read_headers_at_once_do_not_disturb_each_other(tmp_path):
    """CPython 3.11's parser raises SystemError if garbage collection switches threads while it parses."""
    path = tmp_path / "a.npy"
    np.save(path, np.arange(10, dtype=np.uint16))
    program = f"""
import concurrent.futures, gc, sys
from grain_sft.corpus.array_file import parse_header

class Cycle:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        sum(range(50))

def read(_):
    Cycle()
    return parse_header("a.npy", data, len(data))

data = {path.read_bytes()!r}
sys.setswitchinterval(1e-6)
gc.set_threshold(50)
with concurrent.futures.ThreadPoolExecutor(8) as threads:
    print(len(list(threads.map(read, range(4000)))))
"""
    assert run_python("-c", program).stdout == "4000\n"


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("dtype", ["uint32", None])
def test_an_empty_file_holds_no_token(tmp_path, write_tokens, raw, dtype):
    for name, tokens in (("a.npy", range(4)), ("b.npy", []), ("c.npy", range(4, 8))):
        write_tokens(name, tokens)
    if not raw:
        write_npy(tmp_path / "b.npy", np.zeros(0, np.uint32))
    corpus = open_corpus(tmp_path, dtype=dtype, eos_token_id=3)
    assert [shard.num_tokens for shard in corpus.shards] == [4, 0, 4]
    assert corpus.num_documents == 1
    rows = NpyDataSource(WindowLayout(corpus, 4)).read([0, 1])["tokens"]
    np.testing.assert_array_equal(rows.reshape(-1), np.arange(8))


def test_a_raw_file_that_ends_within_a_token_is_refused(tmp_path):
    for dtype, size in (("uint16", 2), ("uint32", 4), ("uint64", 8)):
        (tmp_path / "a.npy").write_bytes(bytes(10 * size + 1))
        expected = f"a.npy: {10 * size + 1} bytes is not a multiple of {size}, the size of a {dtype}."
        assert expected in error_of(tmp_path / "a.npy", dtype=dtype)


WRONG = ("int8", "int32", "int64", "float16", "float32", ">u4", ">u2", "bool", "complex64", "S4", "U2", "M8[s]", "V4")


WRONG_ARRAYS = [
    *((shape, "uint32", f"shape {shape}; expected one dimension") for shape in [(), (2, 3), (6, 1), (1, 1, 6)]),
    *((6, dtype, "little-endian uint8, uint16, uint32, uint64") for dtype in (*WRONG, [("token", "<u4")])),
]


@pytest.mark.parametrize(("shape", "dtype", "expected"), WRONG_ARRAYS)
def test_an_array_of_more_dimensions_or_of_anything_but_unsigned_integers_is_refused(tmp_path, shape, dtype, expected):
    path = write_npy(tmp_path / "a.npy", np.zeros(shape, dtype))
    for asked in (None, "uint32"):
        assert expected in error_of(path, dtype=asked)


# A header of 128 bytes, and 50 tokens of 4 bytes.
NPY = npy_bytes(header_of("(50,)").ljust(117) + "\n", np.arange(50, dtype="<u4").tobytes())
DAMAGED_HEADERS = [
    *((NPY[:size], "header" if size > 7 else "version") for size in (6, 7, 8, 9, 10, 11, 60, 127)),
    *((NPY[:size], f"promises 50 values (200 bytes), but {size - 128} bytes follow it") for size in (324, 327)),
    *((NPY + bytes(more), f"promises 50 values (200 bytes), but {200 + more} bytes") for more in (1, 4)),
    (MAGIC + b"\x02\x00" + struct.pack("<I", 0xFFFFFFF0) + b"{}", "claims 4294967280 bytes, but the file has 14"),
    (MAGIC + b"\x09\x00" + bytes(120), "version [9, 0]; expected [1, 0], [2, 0] or [3, 0]"),
    (b"label,path.npy\n# x" * 4, "don't read as uint32 token ids"),
    (b"version https://git-lfs.github.com/spec/v1\n" + bytes(1), "is a pointer of Git LFS"),
    (struct.pack("<256i", 20240520, 1, 9, *[0] * 253) + bytes(16), "the header of llm.c, 1,024 bytes that are not tokens"),
    (struct.pack("<4I", 2, 16, 20, 24) + bytes(8), "the header of LitData, 16 bytes that are not tokens"),
    (struct.pack("<5000I", 4999, *range(20004, 70000, 10)[:4999]), "the header of LitData, 20,004 bytes"),
    (b"LITPKDS" + bytes(41), "the header of lit-gpt, 24 bytes"),
]
NOT_DICTS = ("", "{", "not python", "[1, 2]", "5", "(" * 300, "-" * 5000 + "1", "__import__('os').abort()")
INCOMPLETE = ("{'descr': '<u4'}", "{'descr': '<u4', 'shape': (2,)}", "{'shape': (2,)}")
BYTES = (header_of("(" + "9" * 5000 + ",)"), header_of("(\0,)"), b"\xff\xfe" + header_of("(2,)").encode())
DTYPES_OF_NONSENSE = ("None", "'(2,u4'", "'2u4'", "'\\uD800'", "'m8[s/0]'")


WRONG_HEADERS = [
    *((header, "the .npy header at byte 8 can't be parsed") for header in (*NOT_DICTS, *INCOMPLETE, *BYTES)),
    *((header_of("(2,)", descr), "expected little-endian") for descr in DTYPES_OF_NONSENSE),
    *((header_of(shape), "expected one dimension") for shape in ("'ab'", "(-2,)", "(2.0,)")),
]
WITH_VERSIONS = [(npy_bytes(text, bytes(8), version), part) for text, part in WRONG_HEADERS for version in (1, 3)]


@pytest.mark.parametrize(("data", "expected"), [*DAMAGED_HEADERS, *WITH_VERSIONS])
def test_a_header_that_is_damaged_or_not_a_valid_dict_is_refused(tmp_path, data, expected):
    (tmp_path / "a.npy").write_bytes(data)
    assert expected in error_of(tmp_path / "a.npy")


def test_files_of_two_dtypes_in_one_corpus_are_refused(tmp_path):
    first = write_npy(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    second = write_npy(tmp_path / "b.npy", np.arange(50, dtype=np.uint32))
    assert "header states uint16, but dtype=uint32 was given" in error_of(first, dtype="uint32")
    assert f"{second}: its tokens are uint32, but those of {first} are uint16" in sft_files.error_of([first, second])


def test_of_several_bad_files_the_first_is_named(tmp_path, write_tokens):
    listed = [write_tokens(f"{number:03}.npy", range(number + 1)) for number in range(100)]
    for number in (90, 40, 70):
        (tmp_path / f"{number:03}.npy").write_bytes(b"odd")
    for _ in range(3):
        assert "040.npy: 3 bytes is not a multiple of 4" in sft_files.error_of(listed)


def test_a_raw_file_that_does_not_look_like_uint32_is_refused_without_a_dtype(write_tokens):
    for dtype in ("uint8", "uint16", "uint64"):
        tokens = np.random.default_rng(0).integers(1, np.iinfo(dtype).max % 100_000, 4096)
        path = write_tokens("a.npy", tokens, dtype)
        assert "no dtype was given. Give dtype=uint8, uint16, uint32 or uint64" in error_of(path), dtype
        np.testing.assert_array_equal(read_all(path, dtype=dtype), tokens)
    assert open_corpus(write_tokens("zeros.npy", np.zeros(100))).num_tokens == 100
