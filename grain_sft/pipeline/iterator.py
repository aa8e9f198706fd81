"""PipelineIterator: a pipeline's batches in order, prefetched by threads or by Grain worker processes."""

import functools
import re
import time
from typing import Any

import grain

from grain_sft.arguments import MOST_AHEAD, as_integer
from grain_sft.errors import PipelineError
from grain_sft.pipeline.amendments import check_same_changes
from grain_sft.pipeline.counts import make_batch
from grain_sft.pipeline.data_loader import StepDataset
from grain_sft.pipeline.read_ahead import ReadAhead
from grain_sft.pipeline.run import Run
from grain_sft.pipeline.step_iterator import StepIterator, checked_step
from grain_sft.source import Element, workers

READ_THREADS = 2  # default number of threads that make batches ahead
PREFETCH = 8  # default number of batches that are made ahead
_STEP, _PIPELINE, _AMENDMENTS, _STAGES = "next_step", "pipeline", "amendments", "stages"  # keys of a state


class PipelineIterator(StepIterator[Element]):
    """Iterator of `Pipeline.iter`. Its state does not depend on the number of threads or workers."""

    def __init__(self, pipeline: Run, start_step: int, *, threads: int, prefetch: int, worker_count: int) -> None:
        self._threads = as_integer("threads", threads, 0, PipelineError, MOST_AHEAD)
        self._prefetch = as_integer("prefetch", prefetch, 0, PipelineError, MOST_AHEAD)
        self._worker_count = as_integer("worker_count", worker_count, 0, PipelineError, MOST_AHEAD)
        self._from_workers: workers.InOrder | None = None
        self._makes_ahead = bool(self._threads or self._worker_count)
        super().__init__(pipeline, start_step)

    def _make(self, step: int) -> Element:
        try:
            batch = super()._make(step) if self._makes_ahead else make_batch(self.pipeline, step)
        except RuntimeError as error:
            if workers.was_ended(error):
                self._stop()
                problem = f"a worker process was ended from outside while step {step} was awaited ({error}). Was memory short?"
                fix = "The next call of next() starts new workers and makes this step again."
                raise PipelineError(f"{problem} {fix}") from error
            raise
        if not self._takes_ready:
            first_steps = self.pipeline.first_steps
            if first_steps.left:
                first_steps.check(self.pipeline, step, batch)
            self._takes_ready = not first_steps.left  # if True, `next` skips this method for ready batches
        return batch

    def _reader_from(self, step: int) -> ReadAhead[Element]:
        ahead = max(self._prefetch, self._threads)
        bounds: dict[str, Any] = {"start": step, "end": self._end}
        if self._worker_count:
            options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=ahead if self._threads else 0)
            processes = grain.MultiprocessingOptions(self._worker_count, max(1, self._prefetch))
            steps = StepDataset(self.pipeline, step).to_iter_dataset(options).mp_prefetch(processes)
            source = self._from_workers = workers.InOrder(steps, step)
            of_source: dict[str, Any] = {"close": source.close, "check": source.check}
            # the workers make the batches ahead, and one thread only takes them in order
            return ReadAhead(source.next, **bounds, **of_source, ahead=1, threads=1, name="grain_sft-take")
        make = functools.partial(make_batch, self.pipeline)
        return ReadAhead(make, **bounds, ahead=ahead, threads=self._threads, name="grain_sft-read")

    def start_prefetch(self) -> None:
        super().start_prefetch()
        source = self._from_workers
        # Wait until the workers have started. Until then, `workers` hides `__main__` from all new processes.
        # `_stop` in another thread ends the wait, because the workers may never start then.
        while source is not None and source is self._from_workers and not source.started:
            time.sleep(0.01)

    def _stop(self) -> None:
        super()._stop()
        self._from_workers = None

    def worker_pids(self) -> list[int] | None:
        source = self._from_workers
        if source is None or source.iterator is None:
            return None
        pids = [process.pid for process in workers.processes(source.iterator)]
        # the workers make the steps in turn: with 2 workers and start 100, worker 1 makes steps 101, 103, ...
        turn = (self.next_step - source.start) % max(1, len(pids))
        return pids[turn:] + pids[:turn]

    def get_state(self) -> dict[str, Any]:
        """Return the state as a dict for JSON: next step, data key, and texts of amendments and later stages."""
        state = {_STEP: self.next_step, _PIPELINE: self.pipeline.data_key}
        changes = {_AMENDMENTS: [*map(str, self.pipeline.amendments)], _STAGES: self.pipeline.later_stages}
        return state | {name: texts for name, texts in changes.items() if texts}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue at the step of `state`.

        Raises:
          PipelineError: `state` is not a state, or it is the state of a pipeline with other data, other amendments or other
            later stages. Amendments and stages that begin at the step of `state` or later are not compared.
          RowIndexError: The pipeline does not have the step.
        """
        if not isinstance(state, dict) or not (state.keys() == {_STEP} or {_STEP, _PIPELINE} <= state.keys()):
            raise PipelineError(f"not a state of Pipeline.iter: {state!r}; expected '{_STEP}' and '{_PIPELINE}'. Give one.")
        for name in (_AMENDMENTS, _STAGES):
            texts = state.get(name) or []
            if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
                raise PipelineError(f"state: '{name}' is {texts!r}; expected a list of texts. Give a saved state.")
        expected = self.pipeline.data_key
        saved = state.get(_PIPELINE, expected)  # a user may have written {"next_step": 5}
        # version 0.1 wrote the index of the saving host into states of order `maxtext`: compare as if it were 0
        if re.sub(r"host=Host\(index=\d+", "host=Host(index=0", str(saved)) != expected:
            found = f"the state is of another pipeline.\n  state:    {saved}\n  pipeline: {expected}"
            fix = "Give the run its old data, or start at a step of your choice with pipeline.iter(start_step=...)."
            raise PipelineError(f"{found}\n{fix}")
        step = checked_step(self.pipeline, state[_STEP])
        check_same_changes("amendment", state.get(_AMENDMENTS) or [], [*map(str, self.pipeline.amendments)], step)
        check_same_changes("later stage", state.get(_STAGES) or [], self.pipeline.later_stages, step)
        self._go_to(step)

    def _get_next_index(self) -> int:  # for Grain's function `get_next_index`
        return self.next_step

    def _set_next_index(self, index: int) -> None:
        self._go_to(checked_step(self.pipeline, index))
