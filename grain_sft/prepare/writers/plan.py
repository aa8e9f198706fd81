"""`Plan`, a corpus before it is written, and `Format`, the functions that write corpora in one format."""

import contextlib
import dataclasses
import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import LABEL_MASKS, SPLIT, split_metadata
from grain_sft.errors import PrepareError
from grain_sft.prepare.documents import Block, Documents, Ids
from grain_sft.prepare.request import Request
from grain_sft.prepare.splits import Rule, Splits
from grain_sft.registry import code_sha256, entry_errors, is_ours
from grain_sft.storage import files


@dataclasses.dataclass(frozen=True)
class Task:
    """A part of a split that is written by itself.

    Attributes:
      split: "train" or "val".
      number: Number of the part in its split, from 0.
      start, stop: The part's documents are [start, stop) in the split's order.
      skip: Number of tokens of document `start` that earlier parts have.
      tokens: Number of tokens of this part.
    """

    split: str
    number: int
    start: int
    stop: int
    skip: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class SplitStatistics:
    """Counts of one split. `truncated` counts documents that were cut. `cut_tokens` counts the tokens that were cut off."""

    documents: int = 0
    tokens: int = 0
    trainable_tokens: int = 0
    truncated: int = 0
    cut_tokens: int = 0
    cut_trainable_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A corpus before it is written.

    Attributes:
      folder: Local or remote folder of the files.
      request: Request of the corpus.
      tokenizer: Description of the tokenizer, as JSON.
      documents: Documents of the inputs by number, dropped ones included.
      splits: Numbers of the documents of each split, in order.
      statistics: Counts of each split.
      binary: Whether every loss weight is 0 or 1.
      source_names: Paths of the inputs, by the input numbers in `documents.sources`.
      tool_calls: Whether the template is made for conversations that call tools.
      masked: Whether some tokens may take no loss.
    """

    folder: str
    request: Request
    tokenizer: Mapping[str, Any]
    documents: Documents
    splits: Splits
    statistics: Mapping[str, SplitStatistics]
    binary: bool
    source_names: Sequence[str] = ()
    tool_calls: bool = False
    masked: bool = True

    def path(self, *names: str) -> str:
        """Return a path below the folder."""
        return files.join(self.folder, *names)

    def blocks(self, task: Task) -> Iterator[Block]:
        """Yield the documents of a task in blocks. They are whole: tokens that belong to other parts are included."""
        return self.documents.blocks(self.splits[task.split][task.start : task.stop])

    def stored(self, block: Block, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return the tokens of a block as `dtype`. Raise a PrepareError if a token does not fit."""
        if (highest := int(block.tokens.max(initial=0))) > np.iinfo(dtype).max:
            problem = f"token id {highest} does not fit in the files, which store {np.dtype(dtype)}"
            raise PrepareError(f"format {self.request.format}: {problem}. Give the tokenizer that made the tokens.")
        return block.tokens.astype(dtype)

    def ends(self, split: str) -> npt.NDArray[np.int64]:
        """Return where each document of a split ends, int64 [documents], in tokens: [3, 5] for documents of 3 and 2 tokens."""
        return np.cumsum(self.documents.lengths[self.splits[split]], dtype=np.int64)

    def write_json(self, name: str, value: Any) -> None:
        files.write_bytes(self.path(name), (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

    def end_of_document(self, *special: str) -> int | None:
        """Return the id that ends a document. If `masked`, it is the first of `special` that the tokenizer has, else EOS."""
        ids = self.tokenizer.get("special_tokens", {}) if self.masked else {}
        return next((ids[text] for text in special if text in ids), self.tokenizer.get("eos_token_id"))

    def metadata(self, split: str, *special: str) -> dict[str, Any]:
        """Return a split's metadata. `special` is as in `end_of_document`."""
        label_masks = {} if self.masked else {LABEL_MASKS: False}  # False: all tokens take loss, so olmo has no mask files
        return split_metadata(
            format=self.request.format,
            split=split,
            eos_token_id=self.end_of_document(*special),
            pad_token_id=self.tokenizer.get("pad_token_id"),
            tokenizer=self.request.tokenizer or None,
            tokenizer_sha256=self.tokenizer.get("sha256"),
            vocab_size=self.tokenizer.get("vocab_size"),
            source_names=self.source_names,
            **label_masks,
        )

    def write_metadata(self, *special: str, sources: Callable[[str], str] = "{}/sources.bin".format) -> None:
        """Write each split's metadata to a corpus.json in its folder, and its sources to the file `sources(split)`."""
        self.write_sources(sources)
        for split in self.splits:
            self.write_json(f"{split}/{SPLIT}", self.metadata(split, *special))

    def write_sources(self, name: Callable[[str], str]) -> None:
        """Write the sources of each split, int64 little-endian pairs (input, line), to the file `name(split)`."""
        for split, ids in self.splits.items():
            with files.atomic_write(self.path(name(split)), "wb") as file:
                for sources in self.documents.sources(ids):
                    file.write(sources.astype("<i8").tobytes())


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of corpora on disk, and the functions that write it.

    Attributes:
      rule: Function that divides documents into splits and orders them. Each kept document is in one split.
      check: Function that raises an error if the format can't hold the plan's documents, or needs a library that is missing.
      tasks: Function that returns the parts of a split, in order. Together, they have all tokens of the split.
      write: Function that writes the files of one part, each atomically.
      finish: Function that writes metadata, after all parts.
      split_paths: Path of each split below the corpus's folder, for `open_corpus`.
      drops_untrainable: Whether documents without a token that takes loss are left out.
      of_pairs: Whether documents are preference pairs. A token's loss is then 0 in the prompt, 1 in the chosen response, and 2
        in the rejected response.
      found_by_eos: Whether the format's own readers find documents by their EOS token.
      holds_empty: Whether the files can hold a document without tokens.
      holds_loss: Whether the files state which tokens take loss.
      max_seed: Largest seed that `rule` accepts; None for no limit.
    """

    rule: Rule
    check: Callable[[Plan], None]
    tasks: Callable[[Plan, str], list[Task]]
    write: Callable[[Plan, Task], None]
    finish: Callable[[Plan], None]
    split_paths: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"train": "train", "val": "val"})
    drops_untrainable: bool = False
    of_pairs: bool = False
    found_by_eos: bool = False
    holds_empty: bool = True
    holds_loss: bool = True
    max_seed: int | None = None

    @property
    def code(self) -> list[str]:
        """SHA-256 of each file that defines functions of this format; [] for a format of this package."""
        hashes = map(code_sha256, (self.rule, self.check, self.tasks, self.write, self.finish))
        return list(dict.fromkeys(filter(None, hashes)))

    def errors_of(self, function: str, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for a call of the attribute `function`. Exceptions of another package become PrepareErrors.

        `name` is the name of the format.
        """
        if is_ours(getattr(self, function)):
            return contextlib.nullcontext()
        return entry_errors(PrepareError, f"format {name}: {function}", "Fix its code.")

    def divided(self, ids: Ids, kept: npt.NDArray[np.bool_], request: Request) -> Splits:
        """Return the result of `rule`. If it is of another package, check that each kept document is in one split."""
        if is_ours(self.rule):
            return self.rule(ids, kept, request)
        with self.errors_of("rule", request.format):
            splits = dict(self.rule(ids, kept, request) or {})
            found = np.concatenate([[], *splits.values()])
            is_whole = np.array_equal(np.sort(found), np.sort(ids[kept]))
        if not is_whole or {*splits} - {"val"} != {"train"}:
            problem = f"rule put {len(found)} documents in the splits {list(splits)}"
            expected = f"each of the {int(kept.sum())} documents once in 'train' or 'val'"
            raise PrepareError(f"format {request.format}: {problem}; expected {expected}. Fix its code.")
        return splits

    def tasks_of(self, plan: Plan) -> list[Task]:
        """Return the parts of all splits. Raise a PrepareError if the format can't hold the plan's documents."""
        name = plan.request.format
        with self.errors_of("check", name):
            self.check(plan)
        tasks = []
        for split, counts in plan.statistics.items():
            without_loss = counts.tokens - counts.trainable_tokens
            if without_loss and not self.holds_loss:
                problem = f"has no masks, but {without_loss:,} of {counts.tokens:,} tokens of {split} take no loss"
                raise PrepareError(f"format {name}: {problem}. Choose a format with masks: olmo, episodes or openchat.")
            with self.errors_of("tasks", name):
                parts = list(self.tasks(plan, split) or ())
                found, expected = sum(part.tokens for part in parts), counts.tokens
            if found != expected:
                problem = f"tasks returned parts of {found:,} tokens; expected the {expected:,} of {split}"
                raise PrepareError(f"format {name}: {problem}. Fix its code.")
            tasks += parts
        return tasks

    def finish_written(self, plan: Plan) -> None:
        """Call `finish`. If `write` is of another package, check that the files of all splits exist."""
        name = plan.request.format
        splits = () if is_ours(self.write) else plan.splits  # the splits to check
        if splits and not files.glob(plan.path("*")):
            raise PrepareError(f"format {name}: write wrote no file below {plan.folder}. Fix its code.")
        with self.errors_of("finish", name):
            self.finish(plan)
        for split in splits:
            path = self.split_paths.get(split)
            if path is None or not files.glob(glob.escape(plan.path(path)) + "*"):
                problem = f"split_paths has {path!r} for {split}, which was not written"
                raise PrepareError(f"format {name}: {problem}. Fix the path, or `write`.")


@contextlib.contextmanager
def whole_files(paths: Sequence[str]) -> Iterator[list[IO[bytes]]]:
    """Open new files. They appear under their names when the context ends, and the first file appears last."""
    with contextlib.ExitStack() as stack:  # closes the files in the opposite order
        yield [stack.enter_context(files.atomic_write(path, "wb")) for path in paths]


def refuse_weights(plan: Plan) -> None:
    """Refuse weights other than 0 and 1."""
    if not plan.binary:
        fix = "Choose format openchat or episodes, or leave out --seq-level-weight and the weights of messages"
        raise PrepareError(f"format {plan.request.format}: can't hold weights other than 0 and 1. {fix}.")


def whole_split(plan: Plan, split: str) -> list[Task]:
    """Return one task for the whole split."""
    return [Task(split, 0, 0, len(plan.splits[split]), 0, plan.statistics[split].tokens)]
