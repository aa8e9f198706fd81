"""Earlier versions of a run, from before amendments and stages were added."""

import contextlib
import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from grain_sft.errors import GrainSftError
from grain_sft.pipeline import Pipeline


class Change(NamedTuple):
    """Amendment or later stage of a run. `text` is its text in the receipt."""

    kind: Literal["an amendment", "a stage"]
    first_step: int
    text: str

    def __str__(self) -> str:
        """Return the text for a message: the whole text of an amendment, or only "from step 100" of a stage."""
        return self.text.partition(":")[0] if self.kind == "a stage" else self.text


def changes_of(pipeline: Pipeline) -> list[Change]:
    """Return the amendments of a run, then its stages after the first."""
    stages = zip(pipeline.stages[1:], pipeline.later_stages, strict=True)
    amendments = [Change("an amendment", amendment.step, str(amendment)) for amendment in pipeline.amendments]
    return amendments + [Change("a stage", stage.first_step, text) for stage, text in stages]


def runs_of(pipeline: Pipeline, load: Mapping[str, str], last_step: int) -> list[Pipeline]:
    """Return the versions of a run that may have written the log's entry `load`.

    The receipt in the entry lists the amendments and stages that the run had then. The receipt does not state where the last
    of these stages ended. So the result has a version for each possible end.

    Args:
      pipeline: Pipeline of the run as it is now.
      load: Fields of the entry, whose action is `dataset_load`.
      last_step: Highest step of the `epoch_complete` entries between `load` and the next load; -1 without such an entry.
    """
    parts = receipt_parts(load.get("receipt_parts"))
    if not parts:
        return [pipeline]
    num_amendments = sum(f"amendment {number}" in parts for number in range(1, len(pipeline.amendments) + 1))
    num_stages = 1 + sum(f"stage {number}" in parts for number in range(2, len(pipeline.later_stages) + 2))
    amended = pipeline  # with all its stages, but only with the amendments of that time
    if num_amendments < len(pipeline.amendments):
        amended = pipeline.replace(num_amendments=num_amendments)
    try:
        versions = amended.with_first_stages(num_stages, last_step)
    except GrainSftError:  # the entry was changed, so no version fits
        return [amended]
    has_all_stages = num_stages == 1 + len(pipeline.later_stages)
    return [amended, *versions] if has_all_stages else versions  # `amended` has the stages as they are now


def receipt_parts(text: str | None) -> dict[str, str]:
    """Return the parts of a receipt from the field `text` of an entry; an empty dict if it can't be read."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        # parsed twice, because `as_text` dumps objects twice
        return {str(name): str(part) for name, part in dict(json.loads(json.loads(text or ""))).items()}
    return {}
