"""`grain-sft trace --find` and `--record` find documents by text and by record. Summaries count by source."""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from batches import load, pipeline_of, put, sections, write_config
from prepared import chat
from sft_files import write_episodes

from grain_sft import PackedLayout, WindowLayout, open_corpus
from grain_sft.errors import CorpusError
from grain_sft.layout import documents_of_record
from grain_sft.prepare import Dataset, Request, prepare
from grain_sft.prepare.training import train_tokenizer
from grain_sft.provenance import documents_with_text, find_document, find_tokenizer, iter_trace, summarize, tokenizer_of, trace

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "hex", "my"]
WORDS += ["boxed", "quartz", "jugs", "and", "nobody", "minds"]
SPECIAL = ("<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>")
HIDDEN = {3: "a violet zeppelin at dawn", 11: "a violet zeppelin at dusk", 25: "zeppelin"}
FIRST = 20  # number of answers in the first of two inputs


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """The folder of a corpus that `prepare` made of two inputs. Answer n contains `HIDDEN[n]`, if there is one."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    answers = [" ".join(random.choice(WORDS, 12)) + f" {HIDDEN.get(number, '')} so" for number in range(30)]
    for name, part in (("one.jsonl", answers[:FIRST]), ("two.jsonl", answers[FIRST:])):
        (folder / name).write_text("".join(json.dumps(chat("tell me", answer)) + "\n" for answer in part))
    (folder / "spm.model").write_bytes(train_tokenizer(answers * 4, 500, SPECIAL))
    datasets = tuple(Dataset((str(folder / name),)) for name in ("one.jsonl", "two.jsonl"))
    request = Request(datasets, "primer", str(folder / "spm.model"), "episodes", val_frac=0.0, shard_tokens=300)
    prepare(request, folder / "chats", workers=1)
    return folder / "chats"


@pytest.fixture
def corpus(chats):
    return open_corpus(chats)


def answers_of(corpus, numbers):
    """Return the numbers of the answers that these documents hold."""
    return [int(source) * FIRST + int(record) - 1 for source, record in corpus.sources[numbers].tolist()]


TEXTS = {
    **{"violet zeppelin": [3, 11], "a violet zeppelin at dusk": [11], "zeppelin": [3, 11, 25], "z": None},
    **{"violet balloon": [], "zeppelin at dawn so": [3], "\u00fcber": [], "me<|eot|><|asst|>": [*range(30)]},
}
"""The answers that contain each text. None means that answers outside of `HIDDEN` may contain it too."""


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize(("text", "expected"), TEXTS.items())
def test_a_text_is_found_in_the_documents_that_hold_it(corpus, monkeypatch, text, expected, block):
    monkeypatch.setattr("grain_sft.provenance.search._BLOCK", block)
    tokenizer = tokenizer_of(corpus)
    found = documents_with_text(corpus, tokenizer, text)
    held = [n for n, each in enumerate(corpus.iter_documents()) if text in tokenizer.decode(each.tokens.tolist())]
    assert found.tolist() == held
    if expected is not None:
        assert sorted(answers_of(corpus, found)) == expected


def test_documents_that_share_tokens_are_all_found(corpus, tmp_path):
    tokenizer = tokenizer_of(corpus)
    [tokens] = tokenizer.encode(["the fox and a violet zeppelin at dawn so"])
    root, count = write_episodes(tmp_path / "shared", [(np.array(tokens), np.ones(len(tokens), np.bool_))]), len(tokens)
    episodes = [[0, count], [1, 0], [1, 2], [2, count - 2], [count - 2, 2]]  # (first token, number of tokens)
    np.array(episodes, "<u8").tofile(root / "train" / "shard_00000" / "episodes.idx")
    assert documents_with_text(open_corpus(root), tokenizer, "a violet zeppelin at dawn").tolist() == [0, 3]


def test_a_record_is_found_by_its_input_and_line(corpus):
    for number, record in ((0, "one.jsonl:1"), (19, "0:20"), (20, "two.jsonl:1"), (29, f"{corpus.source_names[1]}:10")):
        assert answers_of(corpus, documents_of_record(corpus, record)) == [number]
    assert len(documents_of_record(corpus, "one.jsonl:21")) == 0
    for record, words in (("7", "several inputs fit"), ("three.jsonl:1", "no such input"), ("x", "expected LINE")):
        with pytest.raises(CorpusError, match=words):
            documents_of_record(corpus, record)
    with pytest.raises(CorpusError, match="no file of the sources of its documents"):
        documents_of_record(dataclasses.replace(corpus, sources_file=None), "1")


def test_a_missing_tokenizer_a_wrong_tokenizer_and_an_empty_text_are_refused(corpus, write_tokens, tmp_path):
    other = tmp_path / "other.model"
    other.write_bytes(train_tokenizer([" ".join(WORDS)] * 5, 320, SPECIAL))
    with pytest.raises(CorpusError, match="another tokenizer"):
        tokenizer_of(corpus, str(other))
    with pytest.raises(CorpusError, match="no folder 'tokenizer'"):
        tokenizer_of(open_corpus(write_tokens("alone.npy", range(50))))
    with pytest.raises(CorpusError, match="empty text"):
        documents_with_text(corpus, tokenizer_of(corpus), "")


def test_the_tokenizer_that_is_found_for_a_corpus_without_one_is_logged(corpus, chats, write_tokens, tmp_path, caplog):
    assert find_tokenizer(corpus) == str(chats / "tokenizer") and not caplog.records
    (tmp_path / "tokenizer").mkdir()
    assert find_tokenizer(open_corpus(write_tokens("data/raw/a.npy", range(50)), eos_token_id=2)) == str(tmp_path / "tokenizer")
    assert f"{tmp_path / 'tokenizer'}: used as the corpus's tokenizer" in caplog.text


def test_the_path_of_a_tokenizer_is_relative_to_the_config_that_states_it(chats, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "tokenizers"
    folder.mkdir(parents=True)
    shutil.copy(chats / "../spm.model", folder / "own.model")
    (folder / "other.model").write_bytes(train_tokenizer(["another text"] * 9, 290, SPECIAL))
    stated = sections(chats, 64, global_batch_size=1)
    write_config(folder / "base.json", put(stated, "corpus.tokenizer", "own.model"))
    heir = write_config(tmp_path / "runs" / "heir.json", {"inherits": "tokenizers/base.json"})
    assert load(heir).source.layout.corpus.tokenizer_sha256
    other = write_config(folder / "other.json", put(stated, "corpus.tokenizer", "other.model"))
    with pytest.raises(CorpusError, match=f"but '{folder}/other.model', sha256 [0-9a-f]+ was given"):
        load(other)


def test_a_tokenizer_whose_vocabulary_lacks_a_token_of_the_corpus_is_refused(chats, write_tokens):
    other = open_corpus(write_tokens("other.npy", [7, 9, 2, 7000, 2]), dtype="uint32", eos_token_id=2)
    with pytest.raises(CorpusError, match="document 1: has token 7000; expected tokens below 500,"):
        documents_with_text(other, tokenizer_of(other, str(chats / "tokenizer")), "z")


def test_the_command_finds_texts_and_records_in_every_epoch(chats, tmp_path, run_command):
    path = write_config(tmp_path / "run.json", sections(chats, 64, global_batch_size=1, epochs=2))
    for asked, times in ((["--find", "violet zeppelin"], 4), (["--record", "two.jsonl:6"], 2), (["--find", "qqq"], 0)):
        head, *lines = map(json.loads, run_command("trace", path, *asked, "--format", "jsonl").out.splitlines())
        assert len({(line["step"], line["row"], line["segment"]) for line in lines}) == times
        assert ("seen" if times else "no document") in head["about"]
        for line in lines:
            assert "zeppelin" in HIDDEN[FIRST * line["source"].endswith("two.jsonl") + line["record"] - 1]


def test_a_text_is_found_in_a_mixture_of_windows(chats, tmp_path, run_command):
    np.arange(5000, dtype="<u2").tofile(tmp_path / "raw.npy")
    raw = {"weight": 1, "path": str(tmp_path / "raw.npy"), "dtype": "uint16"}
    mixture = {"mixture": {"chats": {"weight": 1, "path": str(chats)}, "raw": raw}}
    config = sections(None, 64, corpus=mixture, layout="windows", global_batch_size=1, order="shuffle")
    path = write_config(tmp_path / "run.json", config)
    head, *lines = map(
        json.loads, run_command("trace", path, "--find", "violet zeppelin", "--format", "jsonl").out.splitlines()
    )
    assert "2 documents, seen" in head["about"] and lines
    message = run_command("trace", path, "--record", "nothing:1", status=1).err
    assert "'chats': record 'nothing:1': no such input" in message and "'raw': record 'nothing:1'" in message


def test_a_summary_counts_by_source(corpus, tmp_path):
    pipeline = pipeline_of(PackedLayout(corpus, 64, cache_dir=tmp_path), global_batch_size=2, epochs=2)
    whole = trace(pipeline, range(pipeline.sampler.num_steps))
    found = summarize(whole)
    assert found == summarize(iter_trace(pipeline, range(pipeline.sampler.num_steps), block_rows=2))
    assert [name.rpartition("/")[2] for name in found["source"]] == ["one.jsonl", "two.jsonl"]
    # as in a long row of layout megatron_gpt
    in_one_segment = dataclasses.replace(whole, **dict.fromkeys(("step", "row", "segment"), np.ones_like(whole.row)))
    for traced, number in itertools.product((whole, in_one_segment), range(2)):
        here, counted = traced.select(traced.source == number), summarize(traced)
        assert counted["documents"][number] == len(set(here.document.tolist()))
        keys = zip(here.step.tolist(), here.row.tolist(), here.segment.tolist(), strict=True)
        assert counted["segments"][number] == len(set(keys))
        assert counted["tokens"][number] == (here.stop - here.start).sum()
        assert counted["trainable"][number] == here.trainable.sum() > 0
    assert sum(found["share"]) == pytest.approx(1)
    left = summarize(dataclasses.replace(whole, withdrawn=np.where(whole.source == 0, whole.stop - whole.start, 0)))
    assert left["documents"] == found["documents"] and left["tokens"] == [0, found["tokens"][1]]
    assert "trainable" not in summarize(trace(pipeline, range(2), trainable=False))
    assert summarize(iter([])) == {"source": [], "documents": [], "segments": [], "tokens": [], "share": []}


def test_a_summary_of_windows_counts_labels_and_leaves_out_rows_of_padding(tmp_path, write_tokens):
    for name, count in (("a", 64), ("b", 160)):
        write_tokens(f"{name}.npy", np.arange(count))
    (tmp_path / "mix.txt").write_text("web,a.npy\ncode,b.npy\n")
    layout = WindowLayout(open_corpus(tmp_path / "mix.txt", dtype="uint32", eos_token_id=5), 32)
    pipeline = pipeline_of(layout, order="shuffle", epochs=1, last_batch="fill")
    found = summarize(trace(pipeline, range(2)))
    assert (found["source"], found["tokens"], found["segments"]) == (["web", "code"], [64, 160], [2, 5])
    assert found["documents"] == [0, 0] and found["trainable"] == [62, 155]
    assert len(find_document(pipeline, 0)) == 1
