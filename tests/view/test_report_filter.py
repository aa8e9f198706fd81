"""A report counts the rows that a user's filter rejects, and does not count withdrawn documents."""

import grain
import numpy as np
from batches import load, pipeline_of, sections, write_config

from grain_sft import PaddedLayout, open_corpus
from grain_sft.transforms import NgramFilter
from grain_sft.view.report import make_report
from grain_sft.view.text import TokenTexts


def test_a_filter_from_outside_is_reported_and_examples_end_where_the_repetition_ends(write_tokens, tmp_path):
    class Repetitive(grain.transforms.Map):
        filters_repetition = True

        def fails(self, tokens, segment_ids=None):
            return NgramFilter().fails(tokens, segment_ids)

        def map(self, element):
            return NgramFilter().map(element)

    tokens = write_tokens("a.npy", np.tile([*([7] * 34), *[*range(20, 33)] * 3, 2, *range(20, 40), 2], 3), "uint16")
    options = {"dtype": "uint16", "eos_token_id": 2}
    layout = PaddedLayout(open_corpus(tokens, **options), 100)
    pipeline = pipeline_of(layout, [Repetitive()], global_batch_size=2, epochs=1)
    found = make_report(pipeline, TokenTexts(None))["filter"]
    assert (found["used"], found["rejected"]) == (True, 3)
    assert {each["text"] for each in found["examples"]} == {"·".join(["⟨7⟩"] * 34)}
    pipeline = pipeline_of(layout, [Repetitive(), NgramFilter(count_padding=True)], global_batch_size=2, epochs=1)
    two = make_report(pipeline, TokenTexts(None))["filter"]
    assert (two["rejected"], two["rejected_for_padding"]) == (6, 3) and two["examples"] == found["examples"]
    stated = sections(tokens, 100, corpus=options, layout="padded", global_batch_size=2)
    stated["amendments"] = [{"withdraw": {"from": 0, "documents": [0, 2, 4]}}]
    found = make_report(load(write_config(tmp_path / "withdrawn.json", stated)), TokenTexts(None))["filter"]
    assert (found["used"], found["rejected"]) == (False, 0)
