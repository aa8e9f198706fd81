"""Findings of a verification, and their report."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Self

from grain_sft.errors import GrainSftError

LISTED = 20  # maximum number of wrong findings that a report, or a part of it, lists for each check


@dataclasses.dataclass(frozen=True)
class Finding:
    """An error, or a fact worth knowing, about a file or a config.

    Attributes:
      check: Name of the check: "files", "boundaries", "vocabulary", "loss", "duplicates", "statistics", "rows", "plan",
        "layout", "sampler", "batches" or "receipt".
      where: Path of the file or the config.
      message: Description, one sentence.
      place: Place in the file, such as "token 17"; "" for the whole file.
      wrong: Whether the finding is an error; False for a fact that may be intended.
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
      what: "corpus", "plan" or "config".
      where: Path of what is verified, or name of a part of it, such as "stage 2".
      full: Whether all bytes were read.
      findings: Findings in the order of the checks. For each stage or source, a check lists at most `LISTED` wrong findings.
      figures: Facts by name, such as counts, the fingerprint, and the figures of each part.
      left_out: Number of wrong findings beyond `LISTED`, by check.
    """

    what: str
    where: str
    full: bool
    findings: list[Finding] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._listed = collections.Counter[str]()  # own wrong findings by check, without those of parts

    def wrong(self, check: str, where: str, message: str, place: str = "") -> None:
        """Add a wrong finding, or only count it if its check has `LISTED` wrong findings already.

        If `message` begins with `where` or `place` and a colon, this beginning is removed.
        """
        if self._listed[check] < LISTED:
            self._listed[check] += 1
            self.findings.append(Finding(check, where, message.removeprefix(f"{where}: ").removeprefix(f"{place}: "), place))
        else:
            self.left_out[check] = self.left_out.get(check, 0) + 1

    def note(self, check: str, where: str, message: str, place: str = "") -> None:
        """Add a finding that is not wrong."""
        self.findings.append(Finding(check, where, message, place, wrong=False))

    @contextlib.contextmanager
    def errors(self, check: str, where: str, place: str = "") -> Iterator[None]:
        """Turn a GrainSftError in this context into a wrong finding."""
        try:
            yield
        except GrainSftError as error:
            self.wrong(check, where, str(error), place)

    def has_wrong(self, *checks: str) -> bool:
        """Return whether one of `checks` (by default any check) has a wrong finding."""
        return any(finding.wrong and (finding.check in checks or not checks) for finding in self.findings)

    def take(self, part: Self) -> None:
        """Add the findings of `part`, the report of a stage or a source, and its figures as one entry, `figures["stage 2"]`."""
        self.findings += part.findings
        self.figures[part.where] = part.figures
        for check, count in part.left_out.items():
            self.left_out[check] = self.left_out.get(check, 0) + count

    @property
    def sound(self) -> bool:
        """Whether no finding is wrong."""
        return not self.has_wrong()

    def as_dict(self) -> dict[str, Any]:
        """Return the report, ready for JSON."""
        return {"sound": self.sound, **dataclasses.asdict(self)}
