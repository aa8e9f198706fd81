"""Token files: raw or .npy is told by content, and what is damaged or no token file is refused with a sentence."""

from __future__ import annotations

import os
import pickle
import struct

import numpy as np
import pytest

import grain_sft
from grain_sft.corpus.shard import scan_shard

DTYPES = ("uint8", "uint16", "uint32", "uint64")
MAGIC = b"\x93NUMPY"
NPY = (
    MAGIC
    + b"\x01\x00\x76\x00"
    + b"{'descr': '<u4', 'fortran_order': False, 'shape': (50,), }".ljust(117)
    + b"\n"
    + np.arange(50, dtype="<u4").tobytes()
)


def write_npy(path, array, version=None, allow_pickle=False):
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version=version, allow_pickle=allow_pickle)
    return path


def write_header(path, header, data=b"", version=1):
    """A .npy file with the header text as given, right or wrong."""
    text = header.encode() if isinstance(header, str) else header
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    path.write_bytes(MAGIC + bytes((version, 0)) + length + text + data)
    return path


def read_all(path, **options):
    corpus = grain_sft.open_corpus([path], **options)
    return grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, corpus.num_tokens))[0]["tokens"]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_npy_header_of_any_version_is_read(tmp_path, version, dtype):
    tokens = np.arange(200).astype(dtype)
    path = write_npy(tmp_path / "a.npy", tokens, version)
    shard, found = scan_shard(str(path), "web", None)
    assert (shard.num_tokens, shard.size, shard.label, found) == (200, os.path.getsize(path), "web", np.dtype(dtype))
    assert shard.data_offset == shard.size - tokens.nbytes
    np.testing.assert_array_equal(read_all(path), tokens)
    np.testing.assert_array_equal(read_all(path, dtype=dtype), tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["a.npy", "a.bin", "a"])
def test_a_raw_file_is_read_whatever_its_name(tmp_path, dtype, name):
    tokens = np.arange(7).astype(dtype)
    tokens.tofile(tmp_path / name)
    np.testing.assert_array_equal(read_all(tmp_path / name, dtype=dtype), tokens)


@pytest.mark.parametrize("name", ["a.bin", "a.raw", "a"])
def test_a_npy_file_under_another_name_is_known_by_its_header(tmp_path, name):
    tokens = np.arange(9, dtype=np.uint16)
    np.testing.assert_array_equal(read_all(write_npy(tmp_path / name, tokens)), tokens)
    assert grain_sft.open_corpus(tmp_path / name).dtype == np.uint16


def test_a_header_that_numpy_pads_far_is_skipped_whole(tmp_path):
    header = "{'descr': '<u2', 'fortran_order': False, 'shape': (5000,), }" + " " * 30_000 + "\n"
    tokens = np.arange(5000, dtype=np.uint16)
    path = write_header(tmp_path / "a.npy", header, tokens.tobytes())
    np.testing.assert_array_equal(read_all(path), tokens)
    plain = write_npy(tmp_path / "b.npy", tokens)
    assert grain_sft.open_corpus(path).shards[0].digest == grain_sft.open_corpus(plain).shards[0].digest


def test_an_array_in_fortran_order_is_the_same_in_one_dimension(tmp_path):
    tokens = np.arange(6, dtype=np.uint32)
    header = "{'descr': '<u4', 'fortran_order': True, 'shape': (6,), }\n"
    np.testing.assert_array_equal(read_all(write_header(tmp_path / "a.npy", header, tokens.tobytes())), tokens)


def test_raw_and_npy_files_make_one_corpus(tmp_path):
    tokens = np.arange(10, dtype=np.uint16)
    tokens.tofile(tmp_path / "a.npy")
    write_npy(tmp_path / "b.npy", tokens + 10)
    corpus = grain_sft.open_corpus(tmp_path, dtype="uint16")
    rows = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 5)).read(range(4))["tokens"]
    np.testing.assert_array_equal(rows.reshape(-1), np.arange(20))


@pytest.mark.parametrize("raw", [True, False])
def test_an_empty_file_holds_no_token_and_hurts_nobody(tmp_path, raw):
    empty = np.zeros(0, np.uint32)
    if raw:
        empty.tofile(tmp_path / "b.npy")
    else:
        write_npy(tmp_path / "b.npy", empty)
    np.arange(4, dtype=np.uint32).tofile(tmp_path / "a.npy")
    np.arange(4, 8, dtype=np.uint32).tofile(tmp_path / "c.npy")
    for dtype in ("uint32", None):
        corpus = grain_sft.open_corpus(tmp_path, dtype=dtype, eos_token_id=3)
        assert [shard.num_tokens for shard in corpus.shards] == [4, 0, 4]
        assert corpus.num_documents == 1
        rows = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 4)).read([0, 1])["tokens"]
        np.testing.assert_array_equal(rows.reshape(-1), np.arange(8))


def error_of(path, **options):
    with pytest.raises(grain_sft.GrainSftError) as error:
        grain_sft.open_corpus([path], **options)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_raw_file_that_ends_within_a_token_is_refused(tmp_path, dtype):
    itemsize = np.dtype(dtype).itemsize
    (tmp_path / "a.npy").write_bytes(bytes(10 * itemsize + 1))
    message = error_of(tmp_path / "a.npy", dtype=dtype)
    assert f"{10 * itemsize + 1} bytes is not a multiple of {itemsize}, the size of a {dtype}." in message


@pytest.mark.parametrize("shape", [(), (2, 3), (6, 1), (1, 1, 6)])
def test_an_array_that_is_not_one_dimensional_is_refused(tmp_path, shape):
    path = write_npy(tmp_path / "a.npy", np.zeros(shape, np.uint32))
    message = error_of(path)
    assert f"shape {shape}; expected one dimension" in message and "reshape(-1)" in message


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "int32",
        "int64",
        "float16",
        "float32",
        ">u4",
        ">u2",
        "bool",
        "complex64",
        "S4",
        "U2",
        "M8[s]",
        "V4",
        [("token", "<u4")],
    ],
)
def test_an_array_of_anything_but_unsigned_integers_is_refused(tmp_path, dtype):
    path = write_npy(tmp_path / "a.npy", np.zeros(6, dtype))
    for asked in (None, "uint32"):
        message = error_of(path, dtype=asked)
        assert "little-endian uint8, uint16, uint32, uint64" in message


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_an_array_of_objects_is_refused_and_never_unpickled(tmp_path):
    bomb = np.array([Bomb(str(tmp_path / "unpickled"))], object)
    path = write_npy(tmp_path / "a.npy", bomb, allow_pickle=True)
    assert "object" in error_of(path)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(bomb[0]))
    error_of(tmp_path / "b.npy", dtype="uint64")
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        *((NPY[:size], "header" if size > 7 else "version") for size in (6, 7, 8, 9, 10, 11, 60, 127)),
        *((NPY[:size], f"promises 50 values (200 bytes), but {size - 128} bytes follow it") for size in (324, 327)),
        *((NPY + bytes(more), f"promises 50 values (200 bytes), but {200 + more} bytes") for more in (1, 4)),
        (MAGIC + b"\x02\x00" + struct.pack("<I", 0xFFFFFFF0) + b"{}", "claims 4294967280 bytes, but the file has 14"),
        (MAGIC + b"\x09\x00" + bytes(120), "version [9, 0]; versions [1, 0], [2, 0] and [3, 0] can be read"),
        (b"label,path.npy\n# x" * 4, "don't read as uint32 token ids"),
        (b"PK\x03\x04" + bytes(96), "don't read as uint32 token ids"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, data, expected):
    (tmp_path / "a.npy").write_bytes(data)
    assert expected in error_of(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{",
        "not python",
        "{'descr': '<u4'}",
        "{'descr': '<u4', 'shape': (2,)}",
        "{'shape': (2,)}",
        "[1, 2]",
        "5",
        "{'descr': None, 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '(2,u4', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '2u4', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': ('<u4', (-1,)), 'fortran_order': False, 'shape': (2,)}",
        "{'descr': ('<u4', (1,)), 'fortran_order': False, 'shape': (2,)}",
        "{'descr': 'u4,,', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': {'names': ['a'], 'formats': [1]}, 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '99999999999999999999u4', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<u4', 'fortran_order': False, 'shape': 2}",
        "{'descr': '<u4', 'fortran_order': False, 'shape': 'ab'}",
        "{'descr': '<u4', 'fortran_order': False, 'shape': (-2,)}",
        "{'descr': '<u4', 'fortran_order': False, 'shape': (2.0,)}",
        "{'descr': '<u4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
        "{'descr': '<u4', 'fortran_order': False, 'shape': (\0,)}",
        "(" * 300,
        "-" * 5000 + "1",
        "__import__('os').abort()",
        "{'descr': '\\uD800', 'fortran_order': False, 'shape': (2,)}",
        b"\xff\xfe{'descr': '<u4', 'fortran_order': False, 'shape': (2,)}",
    ],
)
@pytest.mark.parametrize("version", [1, 3])
def test_a_header_of_nonsense_is_refused(tmp_path, header, version):
    path = write_header(tmp_path / "a.npy", header, bytes(8), version)
    for dtype in (None, "uint32"):
        error_of(path, dtype=dtype)


def test_a_dtype_that_contradicts_the_header_is_refused(tmp_path):
    path = write_npy(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    assert "header says uint16, but dtype=uint32 was asked for" in error_of(path, dtype="uint32")


def test_files_of_two_dtypes_are_no_corpus(tmp_path):
    first = write_npy(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    second = write_npy(tmp_path / "b.npy", np.arange(50, dtype=np.uint32))
    with pytest.raises(grain_sft.GrainSftError, match="All files of a corpus have one dtype") as error:
        grain_sft.open_corpus([first, second])
    assert f"{second}: its tokens are uint32, but those of {first} are uint16" in str(error.value)


def test_the_first_bad_file_in_order_is_the_one_named(tmp_path, write_tokens):
    listed = [write_tokens(f"{number:03}.npy", range(number + 1)) for number in range(100)]
    for number in (90, 40, 70):
        (tmp_path / f"{number:03}.npy").write_bytes(b"odd")
    for _ in range(3):
        with pytest.raises(grain_sft.GrainSftError, match=r"040.npy: 3 bytes is not a multiple of 4"):
            grain_sft.open_corpus(listed)


def test_what_cant_be_read_is_named(tmp_path, write_tokens):
    path = write_tokens("a.npy", range(4))
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "loop.npy").symlink_to("loop.npy")
    (tmp_path / "gone.npy").symlink_to("nowhere")
    assert "no .npy file" in error_of(tmp_path / "folder.npy")
    assert "can't be read" in error_of(tmp_path / "loop.npy")
    assert "no such file" in error_of(tmp_path / "gone.npy")
    assert "no such file" in error_of(path / "below-a-file.npy")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(write_tokens):
    path = write_tokens("a.npy", range(4))
    path.chmod(0)
    assert "can't be read" in error_of(path)


def test_a_link_to_a_token_file_is_read(tmp_path, write_tokens):
    write_tokens("real/a.npy", range(4))
    (tmp_path / "link.npy").symlink_to("real/a.npy")
    np.testing.assert_array_equal(read_all(tmp_path / "link.npy"), range(4))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint64"])
def test_a_raw_file_that_is_not_uint32_asks_for_its_dtype(tmp_path, write_tokens, dtype):
    tokens = np.random.default_rng(0).integers(1, np.iinfo(dtype).max % 100_000, 4096)
    path = write_tokens("a.npy", tokens, dtype)
    message = error_of(path)
    assert "no dtype was given. Give dtype=uint8, uint16, uint32 or uint64" in message
    np.testing.assert_array_equal(read_all(path, dtype=dtype), tokens)


def test_a_raw_file_that_looks_like_uint32_is_read_as_such(write_tokens):
    tokens = np.random.default_rng(0).integers(0, 100_278, 5000)
    path = write_tokens("a.npy", tokens)
    np.testing.assert_array_equal(read_all(path), tokens)
    assert grain_sft.open_corpus(write_tokens("zeros.npy", np.zeros(100))).num_tokens == 100
