"""A mixture of preference pairs has the pairs of its sources. Sources with other rows, lengths or padding are refused."""

import numpy as np
import pytest
from batches import assert_one_run, load
from pair_files import make_pairs, write_pairs
from sft_files import documents, write_olmo

from grain_sft.errors import LayoutError
from grain_sft.layout import MixtureLayout
from grain_sft.provenance import find_document

PAIRS = {"helpful": make_pairs(40, 1), "harmless": make_pairs(25, 2)}
LAYOUT = {"kind": "pairs", "sequence_length": 48, "prompt_length": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pairs")
    for name, pairs in PAIRS.items():
        write_pairs(place / name, pairs)
    write_olmo(place / "chats", documents(60, 3, high=250))
    return place


def config_of(folder, sources, layout=LAYOUT):
    mixture = {name: {"weight": 1, "path": str(folder / name), **options} for name, options in sources.items()}
    sampler = {"order": "shuffle", "seed": 3, "global_batch_size": 6}
    return {"corpus": {"mixture": mixture}, "layout": layout, "sampler": sampler}


def test_every_row_of_a_mixture_is_a_pair_of_its_source_with_any_number_of_hosts(folder):
    config = config_of(folder, {"helpful": {"weight": 2}, "harmless": {"layout": {"long_pairs": "drop"}}})
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
def test_a_mixture_of_pairs_with_other_rows_lengths_or_padding_is_refused(folder, sources, layout):
    """All rows of these mixtures have 80 tokens, so the length of the rows does not show the mistake."""
    plain = {"dtype": "uint16", "eos_token_id": 2}
    sources = {name: {**options, **(plain if name == "chats" else {})} for name, options in sources.items()}
    with pytest.raises(LayoutError, match="expected preference pairs in all sources"):
        load(config_of(folder, sources, layout))


def test_a_source_without_a_name_is_refused(folder):
    """The name "" means a layout that is not a mixture. Amendments and traces would take this source for the whole layout."""
    source = load(config_of(folder, {"helpful": {}, "harmless": {}}, LAYOUT)).source
    with pytest.raises(LayoutError, match="has no name"):
        MixtureLayout({"": source.layout.parts["helpful"], "harmless": source.layout.parts["harmless"]})
