"""Findings: what is wrong, or worth knowing, in a corpus, a plan or a config."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from grain_sft.errors import GrainSftError

LISTED = 20  # findings of one check; more are counted


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence.

    Attributes:
      check: Name of the check: "files", "boundaries", "vocabulary", "loss", "duplicates", "statistics", "rows", "plan",
        "layout", "sampler", "batches" or "receipt".
      where, place: Path of the file, or of the config; and part of it, such as "token 17"; "" for all of it.
      message: The sentence.
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
    """Findings of a verification.

    Attributes:
      what, where: "corpus", "plan" or "config", and its path.
      full: Whether everything was read, and not sizes, headers and ends alone.
      findings: Findings in order; of each check at most `LISTED` that are wrong.
      figures: Counts of shards, tokens, documents, rows, duplicates and so on.
      left_out: Number of wrong findings of a check beyond `LISTED`.
    """

    what: str
    where: str
    full: bool
    findings: list[Finding] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)

    def wrong(self, check: str, where: str, message: str, place: str = "") -> None:
        """Add what is wrong; a message that begins with `where` loses that."""
        if sum(finding.wrong and finding.check == check for finding in self.findings) < LISTED:
            self.findings.append(Finding(check, where, message.removeprefix(f"{where}: "), place))
        else:
            self.left_out[check] = self.left_out.get(check, 0) + 1

    def note(self, check: str, where: str, message: str, place: str = "") -> None:
        """Add what is worth knowing."""
        self.findings.append(Finding(check, where, message, place, wrong=False))

    @contextlib.contextmanager
    def errors(self, check: str, where: str, place: str = "") -> Iterator[None]:
        """Add what is raised inside."""
        try:
            yield
        except GrainSftError as error:
            self.wrong(check, where, str(error), place)

    def has_wrong(self, *checks: str) -> bool:
        """Return whether one of these checks, or any at all, found what is wrong."""
        return any(finding.wrong and (finding.check in checks or not checks) for finding in self.findings)

    def take(self, part: Report) -> None:
        """Add the report of a part; its figures go under its name."""
        self.findings += part.findings
        self.figures[part.where] = part.figures
        for check, count in part.left_out.items():
            self.left_out[check] = self.left_out.get(check, 0) + count

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.has_wrong()

    def as_dict(self) -> dict[str, Any]:
        """Return the report, ready for JSON."""
        return {"sound": self.sound, **dataclasses.asdict(self)}
