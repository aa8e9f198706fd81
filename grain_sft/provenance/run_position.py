"""RunPosition: the step that a run has reached, according to the lines of its audit log."""

import copy
from collections.abc import Iterator
from typing import Self

from grain_sft.pipeline import Run
from grain_sft.provenance.events import Event, Events


class RunPosition:
    """Position of a run between two events, which are starts and completions of epochs.

    A version of a run is the run with the amendments and stages that its config had at some time.

    Attributes:
      events: Events of the run.
      due: Next event; None before the first one is sought, and after the last one.
      since: Step at which the process began or resumed the run; None if that line of the log was altered.
      delivered: Last step that the log proves to be delivered: an event's, or the one before the first step of a resume.
      max_resume_step: Highest step at which the run may resume: the highest step that `due` has had, or the run's end after its
        last event; -1 before the run begins. The caller lowers it to the first step of a new stage or amendment.
      is_known: Whether `due` is known. It is unknown after a changed line, until an intact line states the step.
    """

    def __init__(self, pipeline: Run) -> None:
        self._end_step = pipeline.end_step
        self._upcoming: Iterator[Event] | None = None  # events of this version after `due`
        self.events = Events(pipeline)
        self.due: Event | None = None
        self.since: int | None = 0
        self.delivered = self.max_resume_step = -1
        self.is_known = True

    def in_version(self, pipeline: Run) -> Self:
        """Return this position in `pipeline`, another version of the run."""
        position = copy.copy(self)
        position._end_step, position._upcoming, position.events = pipeline.end_step, None, Events(pipeline)
        return position

    def continue_at(self, step: int) -> None:
        """Continue at `step`, as the run does when it begins or resumes."""
        self.since, self.delivered = step, step - 1
        self._upcoming = self.events.following(step)
        self._advance()

    def go_to(self, event: Event) -> None:
        """Make `event`, one of `events`, the next event."""
        if self.due == event and self._upcoming is not None:  # `_upcoming` is None after `in_version`
            return
        self._upcoming, self.due = self.events.following(event.step), None
        while self.due != event:  # other events of the same step may come before `event`
            self._advance()

    def pass_event(self, event: Event) -> None:
        """Record that the step of `event`, which is due, was delivered, and go to the next event."""
        self.delivered = event.step
        self._advance()

    def _advance(self) -> None:
        """Go to the next event. From now on, the run may resume at the step of that event, or at its end if none is left."""
        assert self._upcoming is not None
        self.due = next(self._upcoming, None)
        self.max_resume_step = max(self.max_resume_step, self._end_step if self.due is None else self.due.step)
