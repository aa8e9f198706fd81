"""Findings: what is wrong, or worth knowing, of what was looked at."""

from __future__ import annotations

import dataclasses
from typing import Any

LISTED = 20
"""Findings of one check that are listed; more are counted."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence.

    Attributes:
      check: what was looked at: "files", "boundaries", "vocabulary", "loss", "duplicates", "statistics", "rows", "plan",
        "layout", "sampler", "batches" or "receipt".
      where: the file, or the config.
      message: the sentence.
      place: where in it, such as "token 17" or "document 3"; "" for all of it.
      wrong: False for what is worth knowing and may well be meant.
    """

    check: str
    where: str
    message: str
    place: str = ""
    wrong: bool = True

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.place, self.message) if part)


@dataclasses.dataclass
class Report:
    """What was found; checks add to it.

    Attributes:
      what: "corpus", "plan" or "config".
      where: what was asked for.
      full: whether everything was read, and not sizes, headers and ends alone.
      findings: in the order in which they were found, of each check at most `LISTED` that are wrong.
      figures: what was counted: shards, tokens, documents, rows, duplicates and so on.
      left_out: findings of a check beyond `LISTED`.
    """

    what: str
    where: str
    full: bool
    findings: list[Finding] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)

    def wrong(self, check: str, where: str, message: str, place: str = "") -> None:
        """Add what is not as it should be; a message that begins with `where` loses that."""
        if sum(finding.wrong and finding.check == check for finding in self.findings) >= LISTED:
            self.left_out[check] = self.left_out.get(check, 0) + 1
            return
        self.findings.append(Finding(check, where, message.removeprefix(f"{where}: "), place))

    def note(self, check: str, where: str, message: str, place: str = "") -> None:
        """Add what is worth knowing."""
        self.findings.append(Finding(check, where, message, place, wrong=False))

    def take(self, part: Report) -> None:
        """Add what was found of a part; its figures stand under its name."""
        self.findings += part.findings
        self.figures[part.where] = part.figures
        for check, count in part.left_out.items():
            self.left_out[check] = self.left_out.get(check, 0) + count

    @property
    def sound(self) -> bool:
        """Nothing is wrong."""
        return not any(finding.wrong for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"sound": self.sound, **dataclasses.asdict(self)}
