"""The acceptance tests of the primer specification: rendering, split, cache."""

import json
import random

import numpy as np
import pytest
from prepared import write_chats

from grain_sft.cli.main import main
from grain_sft.prepare import render_chat_sft, train_tokenizer
from grain_sft.prepare.training import CHAT_TOKENS

SPECIAL = {"sys": 1, "usr": 2, "asst": 3, "eot": 4}


class TinyTokenizer:
    """Characters as ids from 10 on."""

    def encode(self, text):
        return [10 + ord(character) for character in text]

    def special_token_ids(self):
        return dict(SPECIAL)


def test_only_assistant_turns_and_their_eot_are_labeled():
    turns = ("system", "be kind"), ("user", "hi"), ("assistant", "hello"), ("user", "then"), ("assistant", "")
    messages = [{"role": role, "content": content} for role, content in turns]
    system, user, assistant, then, _ = (TinyTokenizer().encode(content) for _, content in turns)
    input_ids, labels = render_chat_sft(TinyTokenizer(), messages)
    assert input_ids == [1, *system, 4, 2, *user, 4, 3, *assistant, 4, 2, *then, 4, 3, 4]
    masked = len(system) + len(user) + 5
    assert labels == [-100] * masked + [*assistant, 4] + [-100] * (len(then) + 3) + [4]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "spm.model"
    lines = [f"the question, the answer, word and then be kind, thanks {number}.{number}" for number in range(200)]
    path.write_bytes(train_tokenizer(lines, 400, CHAT_TOKENS))
    return path


def build(primer, out, tokenizer, *more):
    paths = "--primer-jsonl", str(primer), "--out-dir", str(out), "--tokenizer", str(tokenizer)
    return main(["build-sft-primer", *paths, *more])


def lines_of(folder, split):
    return np.fromfile(folder / f"{split}_sources.bin", "<i8").reshape(-1, 2)[:, 1].tolist()


def test_the_split_is_the_same_each_time_and_that_of_python_s_random(tmp_path, tokenizer):
    primer = write_chats(tmp_path / "primer.jsonl", 57)
    shuffled = list(range(1, 58))
    random.Random(7).shuffle(shuffled)
    for name in ("a", "b"):
        assert build(primer, tmp_path / name, tokenizer, "--seed", "7", "--val-frac", "0.25") == 0
        assert lines_of(tmp_path / name / "primer", "val") == shuffled[:14]  # floor(57 * 0.25)
        assert lines_of(tmp_path / name / "primer", "train") == shuffled[14:]


def test_the_cache_has_its_files_and_its_meta(tmp_path, tokenizer, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAIN_SFT_TOKENIZER", str(tokenizer))
    write_chats(tmp_path / "data/primer.jsonl", 40)
    line = "build-sft-primer --primer-jsonl data/primer.jsonl --out-dir data/cache/sft --seed 42 --val-frac 0.1 --t-max 1024"
    assert main(line.split()) == 0
    folder = tmp_path / "data/cache/sft/primer"
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["source"], len(meta["tokenizer_sha256"])) == ("primer", 64)
    assert set(meta["special_token_ids"]) == {"sys", "usr", "asst", "eot"}
    assert (meta["val_frac"], meta["seed"], meta["T_max"]) == (0.1, 42, 1024)
    for split, examples in (("train", 36), ("val", 4)):
        counts = meta["splits"][split]
        tokens = np.fromfile(folder / f"{split}_input_ids.bin", "<u2")
        labels = np.fromfile(folder / f"{split}_labels.bin", "<i4")
        starts = np.load(folder / f"{split}_idx.npy")
        assert counts["num_examples"] == examples == len(starts)
        assert counts["num_tokens"] == len(tokens) == len(labels) == counts["shard_size"]
        assert counts["num_label_tokens"] == np.count_nonzero(labels != -100)
        assert np.array_equal(labels[labels != -100], tokens[labels != -100])
        assert starts.dtype == np.int64 and starts[0] == 0 and (np.diff(starts) > 0).all()
        assert counts["num_shards"] == 1
        assert (folder / split / "shard_00000.bin").read_bytes() == tokens.tobytes()
    printed = capsys.readouterr().out
    assert "36 examples" in printed and "4 examples" in printed and "data/cache/sft/primer" in printed
    assert f"{meta['splits']['train']['num_tokens']:,} tokens" in printed
