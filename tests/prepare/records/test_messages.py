"""Messages: what their keys mean, and masks that would be ignored."""

import pytest

from grain_sft.errors import RecordError
from grain_sft.prepare import parse_record


@pytest.mark.parametrize("mask", [False, 1, 0])
def test_a_mask_under_another_name_is_refused_and_a_number_is_metadata(mask):
    def parse(loss):
        return parse_record({"messages": [{"role": "assistant", "content": "a", "loss": loss}]})

    assert parse(2.75).messages[0].weight is None
    with pytest.raises(RecordError, match="a mask of this name is not read"):
        parse(mask)


def test_a_call_without_content_may_state_null():
    call = {"role": "assistant_toolcall", "name": "f"}
    assert parse_record({"messages": [{**call, "content": None}]}) == parse_record({"messages": [call]})
