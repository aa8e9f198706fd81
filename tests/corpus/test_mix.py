"""Mix files list the token files of a corpus, one line `label,path` each. A malformed line is an error that names it."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from sft_files import error_of

from grain_sft import NpyDataSource, WindowLayout, open_corpus
from grain_sft.corpus.formats.mix import remap_path

MANIFEST = Path(__file__).resolve().parents[3] / "shared" / "data" / "OLMo-mix-0925-official.txt"
TOKENIZER = "allenai/dolma3-tokenizer"


def write_mix(folder: Path, text: str, name: str = "mix.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def shards(where, **options):
    return [(shard.label, shard.path, shard.num_tokens) for shard in open_corpus(where, **options).shards]


def test_each_line_is_a_shard_with_its_label_in_order(tmp_path, write_tokens):
    """A file that is listed twice is two shards."""
    listed = [("web", "z.npy", 3), ("code", "a.npy", 1), ("twice", "z.npy", 3)]
    expected = [(label, str(write_tokens(name, range(count))), count) for label, name, count in listed]
    mix = write_mix(tmp_path, "# a comment, with a comma\n\n   \n  web ,  z.npy  \n\t# another\ncode,a.npy\ntwice,z.npy")
    assert shards(mix) == expected
    np.testing.assert_array_equal(NpyDataSource(WindowLayout(open_corpus(mix), 3)).read([0, 1])["tokens"], [[0, 1, 2]] * 2)


def test_windows_line_ends_and_a_byte_order_mark_change_nothing(tmp_path, write_tokens):
    path = write_tokens("a.npy", [1, 2])
    for mark, newline in itertools.product(("", "\ufeff"), ("\n", "\r\n")):
        mix = write_mix(tmp_path, mark + "web,a.npy\n\nweb,a.npy\n".replace("\n", newline))
        assert shards(mix) == [("web", str(path), 2)] * 2, (mark, newline)


@pytest.mark.parametrize("options", [{"tokenizer": TOKENIZER}, {"path_remap": {"{TOKENIZER}": TOKENIZER}}])
def test_the_tokenizer_fills_the_placeholder(tmp_path, write_tokens, options):
    path = write_tokens(f"pre/{TOKENIZER}/a.npy", [1, 2])
    mix = write_mix(tmp_path, "web,pre/{TOKENIZER}/a.npy\n")
    assert shards(mix, **options) == [("web", str(path), 2)]
    for prefix in ("old/", "old"):  # a replacement may be a path
        remap = {"{TOKENIZER}": TOKENIZER, prefix: tmp_path / "pre"}
        assert shards(write_mix(tmp_path, "web,old/{TOKENIZER}/a.npy\n", "old"), path_remap=remap)[0][1] == str(path)
    assert open_corpus(mix, **options).tokenizer == options.get("tokenizer")


def test_a_placeholder_left_open_is_an_error_unless_a_file_has_that_name(tmp_path, write_tokens):
    mix = write_mix(tmp_path, "web,pre/{TOKENIZER}/a.npy\n")
    parts = (str(mix), "pre/{TOKENIZER}/a.npy", "placeholder {TOKENIZER}", "path_remap={'{TOKENIZER}'")
    assert all(part in error_of(mix) for part in parts)
    path = write_tokens("pre/{TOKENIZER}/a.npy", [1])
    assert shards(mix) == [("web", str(path), 1)]


REMAPPED = [
    ("pre/{T}/a.npy", {"{T}": "dolma3", "pre/": "/data/", "/data/": "/never/"}, "/data/dolma3/a.npy"),
    ("pre/dolma3/a.npy", {"pre/{T}/": "/x/", "pre/": "/y/{T}/", "{T}": "t"}, "/y/t/dolma3/a.npy"),
    ("pre/{T}/a.npy", {"pre/t/": "/x/", "{T}": "t"}, "/x/a.npy"),
    ("other/a.npy", {"{T}": "dolma3", "pre/": "/data/"}, "other/a.npy"),
    ("old/a/0.npy", {"old/": "/data"}, "/data/a/0.npy"),
    ("old/a/0.npy", {"old": "/data"}, "/data/a/0.npy"),
    ("old/a/0.npy", {"": "/x", "old/": "/data/"}, "/data/a/0.npy"),
    ("a/0.npy", {"": "/data"}, "/data/a/0.npy"),
    ("gs://a/b/deep/0.npy", {"gs://a/b/": "/far/", "gs://a/b/deep/": "/near/", "gs://": "/no/"}, "/near/0.npy"),
]


@pytest.mark.parametrize(("path", "remap", "expected"), REMAPPED)
def test_prefixes_and_placeholders_are_remapped_together(path, remap, expected):
    assert remap_path(path, remap) == expected


def test_relative_paths_start_at_the_mix_or_at_the_working_directory(tmp_path, write_tokens, monkeypatch):
    """The first relative path decides for all: if only the working directory has the file, all paths start there."""
    path = write_tokens("mixes/data/a.npy", [1])
    mix = write_mix(tmp_path / "mixes", "web,data/a.npy\n")
    monkeypatch.chdir(tmp_path)
    assert shards("mixes/mix.txt") == shards(mix) == [("web", str(path), 1)]
    first, second = write_tokens("run/a.npy", [1]), write_tokens("run/b.npy", [1, 2])
    mix = write_mix(tmp_path / "mixes", "web,a.npy\nweb,b.npy\n")
    monkeypatch.chdir(tmp_path / "run")
    assert shards(mix) == [("web", str(first), 1), ("web", str(second), 2)]  # the folder of the mix has no a.npy yet
    paths = write_tokens("mixes/a.npy", [1, 2]), write_tokens("mixes/b.npy", [1])
    assert shards(mix) == [("web", str(paths[0]), 2), ("web", str(paths[1]), 1)]


@pytest.mark.parametrize("line", ["just/a/path.npy", "web,code,a.npy", "web,", ",a.npy", " , ", "x" * 9999])
def test_a_malformed_line_is_named_by_its_number(tmp_path, write_tokens, line):
    write_tokens("a.npy", [1])
    message = error_of(write_mix(tmp_path, f"# comment\n\nweb,a.npy\n{line}\nweb,a.npy\n"))
    assert f"mix.txt:4: expected 'label,path', found '{line.strip()[:50]}" in message and len(message) < 400


WRONG_MIXES = [
    *((text, "lists no file; expected lines 'label,path'") for text in ("", "\n\n", "# only a comment\n")),
    ("web,a.npy\nweb,b.npy\n", "b.npy: no such file. Check the path"),
    ("web,a.npy\nweb,\udcff.npy\n", "byte 14 is not UTF-8"),
    ("web,a\0b.npy", "a\0b.npy"),
    (f"web,{'x' * 5000}.npy", "x" * 50),
]


@pytest.mark.parametrize(("text", "expected"), WRONG_MIXES)
def test_a_mix_that_is_empty_or_not_text_or_lists_a_missing_file_is_an_error(tmp_path, write_tokens, text, expected):
    write_tokens("a.npy", [1])
    mix = tmp_path / "mix.txt"
    mix.write_bytes(text.encode(errors="surrogateescape"))
    for root in (None, tmp_path):
        message = error_of(mix, format="mix", root=root)
        assert str(tmp_path) in message and (expected in message or repr(expected)[1:-1] in message)


@pytest.mark.skipif(not MANIFEST.exists(), reason="the OLMo 3 manifest is not in ../shared/data")
def test_every_line_of_the_real_manifest_is_a_shard_in_order(tmp_path, write_tokens):
    lines = [line.split(",") for line in MANIFEST.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == 950
    expected = []
    for number, (label, path) in enumerate(lines):
        count = number % 37 + 1
        file = write_tokens(path.replace("{TOKENIZER}", TOKENIZER), np.full(count, number))
        expected.append((label, str(file), count))
    remap = {"preprocessed/": f"{tmp_path}/preprocessed/", "{TOKENIZER}": TOKENIZER}
    assert shards(MANIFEST, dtype="uint32", path_remap=remap) == expected
    corpus = open_corpus(MANIFEST, dtype="uint32", path_remap=remap)
    rows = NpyDataSource(WindowLayout(corpus, 1)).read(range(corpus.num_tokens))["tokens"][:, 0]
    np.testing.assert_array_equal(rows, np.repeat(np.arange(950), [count for *_, count in expected]))
