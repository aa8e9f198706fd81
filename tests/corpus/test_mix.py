"""Mix files: which files they list, in what order, and what they say when they are malformed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import grain_sft
from grain_sft.corpus.formats.mix import parse_mix, remap_path

MANIFEST = Path(__file__).resolve().parents[3] / "shared" / "data" / "OLMo-mix-0925-official.txt"
TOKENIZER = "allenai/dolma3-tokenizer"


def write_mix(folder: Path, text: str, name: str = "mix.txt", newline: str = "\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.replace("\n", newline).encode())
    return path


def shards(corpus: grain_sft.Corpus) -> list[tuple[str, str, int]]:
    return [(shard.label, shard.path, shard.num_tokens) for shard in corpus.shards]


def test_shards_follow_the_lines_with_their_labels(tmp_path, write_tokens):
    paths = [write_tokens(name, range(count)) for name, count in (("z.npy", 3), ("a.npy", 1), ("m.npy", 2))]
    mix = write_mix(tmp_path, "web,z.npy\ncode,a.npy\nweb,m.npy\n")
    corpus = grain_sft.open_corpus(mix)
    assert shards(corpus) == [
        ("web", str(paths[0]), 3),
        ("code", str(paths[1]), 1),
        ("web", str(paths[2]), 2),
    ]
    assert corpus.num_tokens == 6


def test_comments_blank_lines_and_spaces_are_no_files(tmp_path, write_tokens):
    write_tokens("a.npy", [1])
    write_tokens("b.npy", [1, 2])
    mix = write_mix(tmp_path, "# NOTE: a comment, with a comma\n\n   \n  web ,  a.npy  \n\t# another\ncode,b.npy")
    assert [entry[0] for entry in shards(grain_sft.open_corpus(mix))] == ["web", "code"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_windows_line_ends_and_a_byte_order_mark_change_nothing(tmp_path, write_tokens, newline, mark):
    path = write_tokens("a.npy", [1, 2])
    mix = write_mix(tmp_path, "web,a.npy\n\nweb,a.npy\n", newline=newline)
    mix.write_bytes(mark + mix.read_bytes())
    assert shards(grain_sft.open_corpus(mix)) == [("web", str(path), 2)] * 2


@pytest.mark.parametrize("options", [{"tokenizer": TOKENIZER}, {"path_remap": {"{TOKENIZER}": TOKENIZER}}])
def test_the_tokenizer_fills_the_placeholder(tmp_path, write_tokens, options):
    path = write_tokens(f"pre/{TOKENIZER}/a.npy", [1, 2])
    mix = write_mix(tmp_path, "web,pre/{TOKENIZER}/a.npy\n")
    corpus = grain_sft.open_corpus(mix, **options)
    assert shards(corpus) == [("web", str(path), 2)]
    assert corpus.tokenizer == options.get("tokenizer")


def test_a_placeholder_left_open_is_an_error_that_says_how_to_fill_it(tmp_path):
    mix = write_mix(tmp_path, "web,pre/{TOKENIZER}/a.npy\n")
    with pytest.raises(grain_sft.GrainSftError) as error:
        grain_sft.open_corpus(mix)
    for part in (str(mix), "pre/{TOKENIZER}/a.npy", "placeholder {TOKENIZER}", "path_remap={'{TOKENIZER}'"):
        assert part in str(error.value)


def test_a_file_whose_name_is_the_placeholder_is_read(tmp_path, write_tokens):
    path = write_tokens("{TOKENIZER}/a.npy", [1])
    assert shards(grain_sft.open_corpus(write_mix(tmp_path, "web,{TOKENIZER}/a.npy"))) == [("web", str(path), 1)]


def test_the_longest_prefix_is_remapped(tmp_path, write_tokens):
    near = write_tokens("near/a.npy", [1])
    far = write_tokens("far/b.npy", [1, 2])
    mix = write_mix(tmp_path, "x,gs://ai2/data/deep/a.npy\ny,gs://ai2/data/b.npy\n")
    remap = {"gs://ai2/data/": f"{tmp_path}/far/", "gs://ai2/data/deep/": f"{tmp_path}/near/", "gs://": "/nowhere/"}
    assert shards(grain_sft.open_corpus(mix, path_remap=remap)) == [("x", str(near), 1), ("y", str(far), 2)]


def test_a_prefix_and_a_placeholder_are_remapped_together():
    remap = {"{TOKENIZER}": "dolma3", "pre/": "/data/", "/data/": "/never/"}
    assert remap_path("pre/{TOKENIZER}/a.npy", remap) == "/data/dolma3/a.npy"
    assert remap_path(
        "pre/dolma3/a.npy", {"pre/{TOKENIZER}/": "/x/", "pre/": "/y/{TOKENIZER}/", "{TOKENIZER}": "t"}
    ) == ("/y/t/dolma3/a.npy")
    assert remap_path("pre/{TOKENIZER}/a.npy", {"pre/t/": "/x/", "{TOKENIZER}": "t"}) == "/x/a.npy"
    assert remap_path("other/a.npy", remap) == "other/a.npy"


def test_relative_paths_start_at_the_mix_wherever_it_is_opened_from(tmp_path, write_tokens, monkeypatch):
    path = write_tokens("mixes/data/a.npy", [1])
    mix = write_mix(tmp_path / "mixes", "web,data/a.npy\n")
    monkeypatch.chdir(tmp_path)
    assert shards(grain_sft.open_corpus("mixes/mix.txt")) == [("web", str(path), 1)]
    assert shards(grain_sft.open_corpus(mix)) == [("web", str(path), 1)]


def test_relative_paths_start_at_the_working_directory_if_the_first_is_only_there(tmp_path, write_tokens, monkeypatch):
    paths = [write_tokens("run/a.npy", [1]), write_tokens("run/b.npy", [1, 2])]
    mix = write_mix(tmp_path / "mixes", "web,a.npy\nweb,b.npy\n")
    monkeypatch.chdir(tmp_path / "run")
    assert shards(grain_sft.open_corpus(mix)) == [("web", str(paths[0]), 1), ("web", str(paths[1]), 2)]


def test_the_folder_of_the_mix_goes_before_the_working_directory(tmp_path, write_tokens, monkeypatch):
    write_tokens("run/a.npy", [1])
    path = write_tokens("mixes/a.npy", [1, 2])
    mix = write_mix(tmp_path / "mixes", "web,a.npy\n")
    monkeypatch.chdir(tmp_path / "run")
    assert shards(grain_sft.open_corpus(mix)) == [("web", str(path), 2)]


def test_a_mix_needs_no_suffix_and_may_stand_in_a_folder_with_brackets(tmp_path, write_tokens):
    path = write_tokens("v[1]/a.npy", [1])
    for name in ("mix.txt", "OLMo-mix"):
        mix = write_mix(tmp_path / "v[1]", "web,a.npy\n", name)
        assert shards(grain_sft.open_corpus(mix)) == [("web", str(path), 1)]


def test_a_file_listed_twice_is_two_shards(tmp_path, write_tokens):
    path = write_tokens("a.npy", range(4))
    write_tokens("b.npy", [9])
    corpus = grain_sft.open_corpus(write_mix(tmp_path, "once,a.npy\nweb,b.npy\ntwice,a.npy\n"))
    assert [(shard.label, shard.path) for shard in corpus.shards][::2] == [("once", str(path)), ("twice", str(path))]
    assert corpus.num_tokens == 9
    rows = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 4)).read([0, 1])["tokens"]
    np.testing.assert_array_equal(rows, [[0, 1, 2, 3]] * 2)


@pytest.mark.parametrize(
    "line",
    ["just/a/path.npy", "web,code,a.npy", "web,", ",a.npy", " , ", "web,a.npy,"],
    ids=["no comma", "two commas", "no path", "no label", "neither", "comma at the end"],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path, write_tokens, line):
    write_tokens("a.npy", [1])
    mix = write_mix(tmp_path, f"# comment\n\nweb,a.npy\n{line}\nweb,a.npy\n")
    with pytest.raises(grain_sft.GrainSftError) as error:
        grain_sft.open_corpus(mix)
    assert f"{mix}:4: expected 'label,path', found {line.strip()!r}" in str(error.value)


def test_a_long_malformed_line_is_shown_in_part(tmp_path):
    with pytest.raises(grain_sft.GrainSftError) as error:
        parse_mix("mix.txt", "x" * 10_000)
    assert "mix.txt:1" in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_mix_without_files_is_an_error(tmp_path, text):
    mix = write_mix(tmp_path, text)
    with pytest.raises(grain_sft.GrainSftError, match="lists no file; expected lines 'label,path'") as error:
        grain_sft.open_corpus(mix)
    assert str(mix) in str(error.value)


def test_a_missing_file_of_a_mix_is_named(tmp_path, write_tokens):
    write_tokens("a.npy", [1])
    with pytest.raises(grain_sft.GrainSftError, match="no such file") as error:
        grain_sft.open_corpus(write_mix(tmp_path, "web,a.npy\nweb,b.npy\n"))
    assert str(tmp_path / "b.npy") in str(error.value) and "path_remap" in str(error.value)


def test_a_missing_mix_is_named(tmp_path):
    for format in ("auto", "mix"):
        with pytest.raises(grain_sft.GrainSftError) as error:
            grain_sft.open_corpus(tmp_path / "mix.txt", format=format)
        assert isinstance(error.value, OSError) and str(tmp_path / "mix.txt") in str(error.value)


def test_a_mix_that_is_no_text_is_an_error_with_the_byte(tmp_path):
    mix = tmp_path / "mix.txt"
    mix.write_bytes(b"web,a.npy\nweb,\xff.npy\n")
    with pytest.raises(grain_sft.GrainSftError, match="byte 14 is not UTF-8") as error:
        grain_sft.open_corpus(mix)
    assert str(mix) in str(error.value)


@pytest.mark.parametrize("path", ["a\0b.npy", "x" * 5000 + ".npy"], ids=["NUL", "too long"])
def test_a_path_that_no_file_can_have_is_an_error(tmp_path, path):
    mix = write_mix(tmp_path, f"web,{path}\n")
    with pytest.raises(grain_sft.GrainSftError) as error:
        grain_sft.open_corpus(mix, format="mix")
    assert path[:50] in str(error.value) or repr(path)[1:-1] in str(error.value)


@pytest.mark.skipif(not MANIFEST.exists(), reason="the OLMo 3 manifest is not in ../shared/data")
@pytest.mark.parametrize("place", ["remapped", "beside the mix"])
def test_every_line_of_the_real_manifest_is_a_shard_in_order(tmp_path, place):
    lines = [line.split(",") for line in MANIFEST.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == 950
    expected = []
    for number, (label, path) in enumerate(lines):
        file = tmp_path / path.replace("{TOKENIZER}", TOKENIZER)
        file.parent.mkdir(parents=True, exist_ok=True)
        count = number % 37 + 1
        np.full(count, number, np.uint32).tofile(file)
        expected.append((label, str(file), count))
    if place == "remapped":
        remap = {"preprocessed/": f"{tmp_path}/preprocessed/", "{TOKENIZER}": TOKENIZER}
        corpus = grain_sft.open_corpus(MANIFEST, dtype="uint32", path_remap=remap)
    else:
        mix = tmp_path / MANIFEST.name
        mix.write_bytes(MANIFEST.read_bytes())
        corpus = grain_sft.open_corpus(mix, dtype="uint32", tokenizer=TOKENIZER)
    assert shards(corpus) == expected
    assert corpus.num_tokens == sum(count for *_, count in expected)
    assert len({os.path.dirname(path) for _, path, _ in expected}) > 60  # as varied as the labels
    rows = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 1)).read(range(corpus.num_tokens))["tokens"][:, 0]
    np.testing.assert_array_equal(rows, np.repeat(np.arange(950), [count for *_, count in expected]))


@pytest.mark.parametrize(
    "remap",
    [
        lambda folder: {"old/": f"{folder}/"},
        lambda folder: {"old/": folder},
        lambda folder: {"old": folder},
        lambda folder: {"": folder, "old/": f"{folder}/"},
    ],
)
def test_a_folder_replaces_a_folder_with_or_without_its_slash(write_tokens, tmp_path, remap):
    write_tokens("data/a/0.npy", [1, 2])
    (tmp_path / "mix.txt").write_text("web,old/a/0.npy\n")
    corpus = grain_sft.open_corpus(tmp_path / "mix.txt", path_remap=remap(tmp_path / "data"))
    assert corpus.shards[0].path == str(tmp_path / "data/a/0.npy")


def test_the_empty_prefix_puts_every_path_below_a_folder(write_tokens, tmp_path):
    write_tokens("data/a/0.npy", [1, 2])
    (tmp_path / "mix.txt").write_text("web,a/0.npy\n")
    corpus = grain_sft.open_corpus(tmp_path / "mix.txt", path_remap={"": tmp_path / "data"})
    assert corpus.shards[0].path == str(tmp_path / "data/a/0.npy")
