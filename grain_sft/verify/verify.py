"""`verify`: checks that a corpus, a plan or a config is sound."""

import contextlib
import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

from grain_sft.arguments import as_integer, check_choice
from grain_sft.config import is_config, load
from grain_sft.corpus import open_corpus
from grain_sft.errors import CorpusError
from grain_sft.sampling import Host
from grain_sft.storage import artifact, files
from grain_sft.verify.check_corpus import check_corpus
from grain_sft.verify.check_pipeline import check_pipeline, check_plan_file
from grain_sft.verify.finding import Report

KINDS = ("corpus", "plan", "config")
_LARGEST_CONFIG = 1 << 20  # bytes; a larger .json file is read as the saved index of a corpus


def verify(
    where: str | os.PathLike[str],
    *,
    full: bool = False,
    what: str | None = None,
    vocab_size: int | None = None,
    corpus: str | os.PathLike[str] | None = None,
    receipt: str | None = None,
    host: Host | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Check that a corpus, a plan or a config is sound.

    Args:
      where: Path of a corpus (as in `open_corpus`), of a plan (as `grain-sft pack` prints it) or of a config.
      full: Whether to read all bytes, in bounded memory. False reads sizes, headers, boundaries, the ends of files, and samples
        of documents, rows and batches.
      what: "corpus", "plan" or "config". None infers the kind from the name and the first bytes of `where`.
      vocab_size: Number of ids of the vocabulary. None means the number that prepare.json or the tokenizer next to the corpus
        states.
      corpus: Path of the corpus that a plan is compared with. None means that the plan is checked alone.
      receipt: Expected code of a config's receipt, such as "gs2-1f0c...".
      host: Host whose batches of a config are checked. None means `Host(0, 1)`.
      options: Options of `open_corpus` for the corpus in `where`, or for `corpus`.

    Returns:
      Report of the findings. If the corpus or the config can't be opened, the error is a finding.

    Raises:
      CorpusError: `what` is unknown, or an argument does not apply, such as `receipt` to a corpus.
    """
    path = files.normalize(where)
    kind = what or _inferred(path)
    check_choice("what", kind, KINDS, CorpusError)
    vocab_size = None if vocab_size is None else as_integer("vocab_size", vocab_size, 1, CorpusError)
    # each argument, whether it is given, and the kind that uses it
    for name, is_given, used_by in (
        ("corpus", corpus is not None, "plan"),
        ("receipt", receipt is not None, "config"),
        ("host", host is not None, "config"),
        ("vocab_size", vocab_size is not None, "corpus" if kind == "plan" else kind),  # for every kind except "plan"
        # options also apply to the `corpus` that a plan is compared with
        (", ".join(options or ()), bool(options) and corpus is None, "corpus"),
    ):
        if is_given and kind != used_by:
            fix = f"Leave out {name}, or give what={used_by} (--as {used_by})"
            raise CorpusError(f"{path} is read as a {kind}, but {name} applies to a {used_by}. {fix}.")
    report = Report(kind, path, full or kind == "plan")  # a plan is always read in full, for its checksum
    if kind == "config":
        _check_config(report, path, vocab_size, receipt, host or Host(0, 1))
    elif kind == "plan" and corpus is None:
        check_plan_file(report, path, None)
    else:
        source = path if corpus is None else files.normalize(corpus)
        with report.errors("files", source):
            opened = open_corpus(source, **(options or {}))
            if kind == "plan":
                check_plan_file(report, path, opened)
            else:
                check_corpus(report, opened, path, vocab_size)
                _note_other_split(report, path)
    return report


def _note_other_split(report: Report, path: str) -> None:
    """If `path` has two splits, add a note that only the training split was checked."""
    other = os.path.join(path, "val")
    if not files.is_remote(path) and all(map(os.path.isdir, (other, os.path.join(path, "train")))):
        sentence = f"only the training split was checked. Check the validation split: grain-sft verify {shlex.quote(other)}"
        report.note("files", path, sentence)


def _check_config(report: Report, path: str, vocab_size: int | None, receipt: str | None, host: Host) -> None:
    """Load a config, and check the corpora, layout, sampler and batches of each stage."""
    with report.errors("files", path):
        pipeline = load(path, host=host)
        vocab_sizes: dict[tuple[str, ...], int | None] = {}  # by `corpus_key`, because stages may share a corpus
        for number, stage in enumerate(pipeline.stages, 1):
            stage_report = report if number == 1 else Report("config", f"stage {number}", report.full)
            stage_vocab_sizes = []
            for name, part in stage.source.layout.parts.items():
                corpus_key = (part.corpus.fingerprint, *(shard.path for shard in part.corpus.shards))
                part_report = Report("corpus", f"source {name}", report.full) if name else stage_report
                if corpus_key not in vocab_sizes:
                    vocab_sizes[corpus_key] = check_corpus(part_report, part.corpus, "", vocab_size)
                    if name:
                        stage_report.take(part_report)
                stage_vocab_sizes.append(vocab_sizes[corpus_key])
            if not stage_report.has_wrong("files"):
                # If the size of one vocabulary is unknown, the ids of batches are not checked. `filter` only tells mypy that no
                # size is None.
                largest = None if None in stage_vocab_sizes else max(filter(None, stage_vocab_sizes), default=None)
                check_pipeline(stage_report, stage, path, largest)
            if stage_report is not report:
                report.take(stage_report)
            if report.has_wrong("files"):
                return
        report.figures["receipt"] = pipeline.receipt.code
        if receipt is not None and receipt != pipeline.receipt.code:
            listed = "; ".join(f"{name}: {part}" for name, part in pipeline.receipt.parts.items())
            sentence = f"its receipt is {pipeline.receipt.code}, expected {receipt}. Compare its parts: {listed}."
            report.wrong("receipt", path, sentence)


def _inferred(path: str) -> str:
    """Return one of `KINDS`, inferred from the name and the first bytes of a path."""
    if path.endswith((".yaml", ".yml")):
        return "config"
    if path.endswith(artifact.SUFFIX):
        return "plan"
    if os.path.isfile(path):
        # if this fails, `open_corpus` reports the reason
        with contextlib.suppress(OSError, ValueError, RecursionError), open(path, "rb") as file:
            head = file.read(_LARGEST_CONFIG + 1)
            if head.startswith(artifact.MAGIC):
                return "plan"
            value = json.loads(head) if path.endswith(".json") and len(head) <= _LARGEST_CONFIG else None
            # a dict with `format_version` or `shards` is the saved index of a corpus
            if isinstance(value, dict) and is_config(value) and not value.keys() & {"format_version", "shards"}:
                return "config"
    return "corpus"
