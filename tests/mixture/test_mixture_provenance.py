"""Traces of a mixture name the source of each row. Tables of checkpoints count the epochs of each source."""

import json

import numpy as np
from batches import assert_is_traced, load, put, write_config
from mixed_corpora import LENGTH, mixed, mixture_config

from grain_sft import PaddedLayout, open_corpus
from grain_sft.layout import MixtureLayout
from grain_sft.provenance import checkpoint_table, difference, summarize, trace


def test_the_trace_of_a_mixture_describes_its_batches(folder):
    pipeline = mixed(folder, schedule=[{"step": 4, "weights": {"chat": 0.4}}, {"step": 6, "global_batch_size": 18}])
    found = trace(pipeline, range(10))
    assert_is_traced(found, [pipeline], range(10))
    layout = pipeline.source.layout
    names = [found.source_names[number].split("/")[0] for number in found.source.tolist()]
    assert names == [layout.names[part] for part in layout.parts_of(found.instance)]
    seen = set(names)
    assert seen == {"chat", "talks", "web"}
    assert {name.split("/")[0] for name in summarize(found)["source"]} == seen
    assert sum(summarize(found)["tokens"]) == int((found.stop - found.start).sum())
    assert (found.document[[found.source_names[number] == "web" for number in found.source]] == -1).all()


def test_the_table_of_checkpoints_counts_epochs_for_each_source(folder):
    pipeline = mixed(folder)
    table = checkpoint_table(pipeline, 5)
    rows = np.concatenate([pipeline.sampler.rows(step) for step in range(table["step"][-1])])
    part = pipeline.source.layout.parts_of(rows)
    for place, step in enumerate(table["step"]):
        for number, name in enumerate(("chat", "talks", "web")):
            size = len(pipeline.source.layout.parts[name])
            count = int((part[: step * 12] == number).sum())
            assert divmod(count, size) == (table[f"epoch of {name}"][place], table[f"rows into epoch of {name}"][place])


def test_mixtures_of_equal_sizes_in_another_order_differ(folder, write_tokens):
    config = mixture_config(folder)
    web = config["corpus"]["mixture"]["web"]
    sources = {"web": web, "other": web | {"path": str(write_tokens("other.npy", [7] * 40 * LENGTH, "uint8"))}}
    pair = [load(put(config, "corpus.mixture", dict(order(sources.items())))) for order in (list, reversed)]
    assert difference(*pair, steps=range(3)).first_step == 0


def test_the_command_line_traces_a_mixture(folder, tmp_path, run_command):
    path = write_config(tmp_path / "run.json", mixture_config(folder))

    def traced(*arguments):
        printed = run_command("trace", path, *arguments, "--format", "jsonl").out
        return [json.loads(line) for line in printed.splitlines()][1:]

    num_chats = len(load(path).source.layout.parts["chat"].corpus.documents)
    document = next(line["document"] for line in traced("--steps", "0:5") if line["source"] == "talks")
    found = traced("--document", f"talks:{document - num_chats}")
    assert found and all(line["document"] == document and line["source"] == "talks" for line in found)
    found = traced("--record", "1:2")
    assert found and all(line["source"].startswith("chat") and line["record"] == 2 for line in found)
    for record, is_found in (("1:2", True), ("1:999", False)):  # only "chat" states the records of its documents
        printed = run_command("trace", path, "--record", record)
        assert ("no document" in printed.out) == (not is_found)
        assert "Sources not searched: 'talks', 'web'. The first error: " in printed.err
    assert "epoch of chat" in run_command("trace", path, "--checkpoints", "10").out
    assert "layout of talks" in run_command("receipt", path).out
    error = run_command("trace", path, "--document", "talk:3", status=1).err
    assert "no such source; expected one of chat, talks, web" in error


class WithoutDocuments(PaddedLayout):
    """A layout that does not state the documents of its rows."""

    def pieces(self, rows):
        return super().pieces(rows)._replace(document=np.full(len(rows), -1))


def test_a_mixture_gives_no_document_to_pieces_without_one(folder):
    corpus = open_corpus(folder / "talks")
    layout = MixtureLayout({"one": PaddedLayout(corpus, 8), "two": WithoutDocuments(corpus, 8)})
    assert layout.pieces(np.arange(len(layout))).document.tolist() == [*range(25), *[-1] * 25]
