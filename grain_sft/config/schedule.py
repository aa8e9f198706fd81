"""`sampler.schedule`: what changes at which step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from grain_sft.config.keys import SCHEDULE
from grain_sft.config.kinds import check_keys, check_kind
from grain_sft.errors import ConfigError

SIZES = ("global_batch_size", "global_batch_tokens")


def check_schedule(entries: object, where: str, *, names: Iterable[str] | None, sizes: bool, length: int) -> None:
    """Check the entries of a schedule.

    Args:
      where: for messages: the config and the place of the schedule.
      names: of the sources of a mixture, whose weights may change; None where it is none.
      sizes: whether the batch may change.
      length: of a row, in tokens.

    Raises:
      ConfigError: for the first that is wrong.
    """
    left_out = (*(() if sizes else SIZES), *(("weights",) if names is None else ()))
    known = {name: key for name, key in SCHEDULE.items() if name not in left_out}
    last = 0
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where} is {entries!r}; expected a list of entries with {', '.join(known)}.")
    for number, entry in enumerate(entries):
        at = f"{where}[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{at} is {entry!r}; expected an entry with {', '.join(known)}.")
        check_keys(entry, known, at)
        for key, value in entry.items():
            check_kind(value, known[key].kind, f"{at}.{key}")
        if entry.get("step", 0) <= last:
            raise ConfigError(
                f"{at}.step is {entry.get('step')}; expected a step from {last + 1} on: entries stand by step, and what holds "
                "from step 0 on stands beside the schedule."
            )
        last = entry["step"]
        if len(entry) == 1 or all(key in entry for key in SIZES):
            raise ConfigError(
                f"{at}: give what changes at step {last}: {', '.join(list(known)[1:])}; of the sizes, one."
            )
        if "global_batch_tokens" in entry:
            check_batch_tokens(entry["global_batch_tokens"], length, f"{at}.global_batch_tokens")
        if "weights" in entry and names is not None:
            check_weights(entry["weights"], names, f"{at}.weights")


def check_batch_tokens(tokens: int, length: int, where: str) -> None:
    """Check that a batch given in tokens is whole rows of `length` tokens, as OLMo-core does.

    Raises:
      ConfigError: with the two nearest numbers of tokens that are.
    """
    if length < 1 or tokens < length:
        raise ConfigError(
            f"{where} is {tokens}, less than one row of layout.sequence_length={length}. Give {length} or more."
        )
    rows, over = divmod(tokens, length)
    if over:
        raise ConfigError(
            f"{where} is {tokens}, which is {rows} rows of layout.sequence_length={length} and {over} tokens. Expected whole "
            f"rows. Give {rows * length} or {(rows + 1) * length}."
        )


def check_weights(weights: Mapping[Any, Any], names: Iterable[str], where: str) -> None:
    """Check weights by name: those that are given, the others stay as they were."""
    check_keys(weights, tuple(names), where)
    for name, weight in weights.items():
        check_kind(weight, (int, float, str), f"{where}.{name}")


def sizes_of(entries: Iterable[Mapping[str, Any]], length: int) -> list[tuple[int, int]]:
    """The batches of a checked schedule, in rows, by step."""
    found = []
    for entry in entries:
        if "global_batch_tokens" in entry:
            found.append((entry["step"], entry["global_batch_tokens"] // length))
        elif "global_batch_size" in entry:
            found.append((entry["step"], entry["global_batch_size"]))
    return found


def weights_of(entries: Iterable[Mapping[str, Any]], before: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """The weights of a checked schedule, all sources', by step; one that an entry does not name stays as it was."""
    found: list[tuple[int, dict[str, Any]]] = []
    weights = dict(before)
    for entry in entries:
        if "weights" in entry:
            weights = {**weights, **entry["weights"]}
            found.append((entry["step"], weights))
    return found
