"""Traces of a mixture name the source of each row. Tables of checkpoints count the epochs of each source.

A mixture of preference pairs has the pairs of its sources. Sources with other rows, lengths or padding are refused.
"""

import json

import numpy as np
import pytest
from batches import assert_is_traced, assert_one_run, assert_same, load, put, sections, write_config
from mixed_corpora import LENGTH, mixed, mixture_config
from sft_files import documents, make_pairs, write_olmo, write_pairs

from grain_sft import PaddedLayout, open_corpus
from grain_sft.errors import LayoutError
from grain_sft.layout import MixtureLayout
from grain_sft.provenance import checkpoint_table, difference, find_document, summarize, trace


@pytest.mark.parametrize("at_the_end", ["stop", "fail"])
def test_the_trace_of_a_mixture_describes_its_batches(folder, at_the_end):
    schedule = [{"step": 4, "weights": {"chat": 0.4}}, {"step": 6, "global_batch_size": 18}]
    config = mixture_config(folder, schedule=schedule, on_exhausted=at_the_end)
    pipeline = load(put(config, "corpus.mixture.web.max_epochs", 1))
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
    whole, of_documents = trace(pipeline, range(pipeline.sampler.end_of_batches)), find_document(pipeline, [3, 70])
    assert_same(of_documents.columns(), whole.select(np.isin(whole.document, [3, 70])).columns())
    assert len(set(of_documents.epoch.tolist())) > 2


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


PAIRS = {"helpful": make_pairs(40, 1), "harmless": make_pairs(25, 2)}
LAYOUT = {"kind": "pairs", "sequence_length": 48, "prompt_length": 16}


@pytest.fixture(scope="module")
def pairs_folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pairs")
    for name, pairs in PAIRS.items():
        write_pairs(place / name, pairs)
    write_olmo(place / "chats", documents(60, 3, high=250))
    return place


def config_of(pairs_folder, sources, layout=LAYOUT):
    mixture = {name: {"weight": 1, "path": str(pairs_folder / name), **options} for name, options in sources.items()}
    sampler = {"order": "shuffle", "seed": 3, "global_batch_size": 6}
    return sections(None, 48, corpus={"mixture": mixture}, layout=layout, **sampler)


def test_every_row_of_a_mixture_is_a_pair_of_its_source_with_any_number_of_hosts(pairs_folder):
    config = config_of(pairs_folder, {"helpful": {"weight": 2}, "harmless": {"layout": {"long_pairs": "drop"}}})
    pipeline = load(config)
    layout, seen = pipeline.source.layout, set()
    for step in range(12):
        rows, batch = pipeline.sampler.rows(step), pipeline[step]
        for name, index, numbers in layout.split(rows):
            for row, number in zip(index.tolist(), numbers.tolist(), strict=True):
                prompt, chosen, rejected = PAIRS[name][layout.parts[name].pieces(np.array([number])).document[0]]
                expected = {"prompt": prompt[-16:], "chosen": chosen[:32], "rejected": rejected[:32]}
                for key, ids in expected.items():
                    assert batch[f"{key}_ids"][row][batch[f"{key}_mask"][row] != 0].tolist() == ids
                seen.add(name)
    assert seen == set(PAIRS)
    assert_one_run(lambda host: load(config, host=host), range(2, 6), (2, 3))
    document = layout.first_document("harmless") + int(layout.parts["harmless"].pieces(np.array([0])).document[0])
    found = find_document(pipeline, [document], epochs=1)
    assert len(set(found.step.tolist())) == 1 and set(found.document.tolist()) == {document}


MISFITS = [
    ({"helpful": {}, "chats": {"layout": {"kind": "packed", "sequence_length": 80}}}, LAYOUT),
    ({"chats": {}, "helpful": {"layout": LAYOUT}}, {"kind": "packed", "sequence_length": 80}),
    ({"helpful": {}, "harmless": {"layout": {"sequence_length": 50, "prompt_length": 20}}}, LAYOUT),
    ({"helpful": {}, "harmless": {"pad_token_id": 2}}, LAYOUT),
]


@pytest.mark.parametrize(("sources", "layout"), MISFITS)
def test_a_mixture_of_pairs_with_other_rows_lengths_or_padding_is_refused(pairs_folder, sources, layout):
    """All rows of these mixtures have 80 tokens, so the length of the rows does not show the mistake."""
    plain = {"dtype": "uint16", "eos_token_id": 2}
    sources = {name: {**options, **(plain if name == "chats" else {})} for name, options in sources.items()}
    with pytest.raises(LayoutError, match="expected preference pairs in all sources"):
        load(config_of(pairs_folder, sources, layout))


def test_a_source_without_a_name_is_refused(pairs_folder):
    """The name "" means a layout that is not a mixture. Amendments and traces would take this source for the whole layout."""
    source = load(config_of(pairs_folder, {"helpful": {}, "harmless": {}}, LAYOUT)).source
    with pytest.raises(LayoutError, match="has no name"):
        MixtureLayout({"": source.layout.parts["helpful"], "harmless": source.layout.parts["harmless"]})
