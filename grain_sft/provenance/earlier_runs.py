"""Earlier versions of a run, which wrote its audit log before the latest amendments and stages were added."""

import contextlib
import json
from collections.abc import Mapping

from grain_sft.errors import GrainSftError
from grain_sft.pipeline import Pipeline


def runs_of(pipeline: Pipeline, load: Mapping[str, str], last_step: int) -> list[Pipeline]:
    """Return the versions of a run that may have written the entry `load`. Each has some of the amendments and stages of
    `pipeline`, the first ones, and may have ended with `last_step`."""
    parts = receipt_parts(load.get("receipt_parts"))
    if not parts:
        return [pipeline]
    amendments = sum(f"amendment {number}" in parts for number in range(1, len(pipeline.amendments) + 1))
    stages = 1 + sum(f"stage {number}" in parts for number in range(2, len(pipeline.later_stages) + 2))
    now = pipeline if amendments == len(pipeline.amendments) else pipeline.replace(num_amendments=amendments)
    with contextlib.suppress(GrainSftError):  # an entry that was changed may be of no run
        found = now.with_first_stages(stages, last_step)
        return found if stages <= len(pipeline.later_stages) else [now, *found]
    return [now]


def changes_of(pipeline: Pipeline) -> list[tuple[str, str]]:
    """Return (kind, text) of each amendment and each later stage of a run. A text begins with the first step that changes."""
    changes = [("an amendment", str(each)) for each in pipeline.amendments]
    return changes + [("a stage", each) for each in pipeline.later_stages]


def shown(kind: str, text: str) -> str:
    """Return the text of a change for a message, without the data of a stage."""
    return text if kind == "an amendment" else text.partition(":")[0]


def receipt_parts(text: str | None) -> dict[str, str]:
    """Return the parts of the receipt in an entry, as text; an empty dict if the entry has none that can be read."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return {name: str(part) for name, part in dict(json.loads(json.loads(text or ""))).items()}
    return {}
