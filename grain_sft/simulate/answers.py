"""Answers to "can this bucket, this cache and these hosts feed this run?"."""

from collections.abc import Mapping
from typing import Any


def answers(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the answers: for each resource its name (`asked`), whether it is `enough`, and a sentence (`answer`)."""
    of, steady, waits = figures["conditions"], figures["steady"], figures["waits"]
    step_s = of["step_ms"] / 1e3
    found = [
        _answer(
            "bucket, requests", steady["requests"] / step_s, of["bucket_requests"], "requests/s", "--bucket-requests"
        ),
        _answer("bucket, bytes", steady["received"] / step_s / 1e6, of["bucket_mb"], "MB/s", "--bucket-mb"),
        _answer(
            "network of a host",
            (figures["per_host"]["received"]["most"] / (figures["steps"][1] - figures["steps"][0])) / step_s / 1e6,
            of["host_mb"], "MB/s", "--host-mb",
        ),
    ]  # fmt: skip
    longest = f"the longest wait is {waits['longest_s']:.2f} s"
    wait = f"Steps of {of['step_ms']:g} ms wait {waits['share']:.2%} of the time; {longest}."
    found.append({"asked": "waits", "enough": waits["share"] <= 0.01, "answer": wait})
    return found


def _answer(asked: str, need: float, have: float, unit: str, option: str) -> dict[str, Any]:
    enough = need <= have
    share = (
        f"{need:,.0f} of {have:,.0f} {unit} ({need / have:.1%})" if need >= 10 else f"{need:.2f} of {have:,.0f} {unit}"
    )
    advice = "" if enough else f" Give a cache, larger reads, a longer step, or {option} if the bucket has more."
    return {"asked": asked, "enough": enough, "answer": f"{share}.{advice}"}
