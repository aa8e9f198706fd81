"""`convert`, which writes the documents of a corpus in another format, in the same order."""

import functools
import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, TokenDtype, check_tokenizer, open_corpus
from grain_sft.errors import CorpusError, PrepareError
from grain_sft.layout import corpus_documents_named
from grain_sft.prepare.documents import Documents, Ids, Reader
from grain_sft.prepare.job import finish, run_steps, write_tasks
from grain_sft.prepare.request import GIB, Dataset, Request
from grain_sft.prepare.target import MANIFEST, Target, read_object
from grain_sft.prepare.tokenizers import Tokenizer, load_tokenizer
from grain_sft.prepare.writers import FORMATS, Format, Plan, SplitStatistics
from grain_sft.progress import Progress
from grain_sft.storage import artifact, files

VALIDATION = ("val/token_ids_part_*.npy", "val/**/episodes.idx", "val_idx.npy", "val/*.idx")
"""Glob patterns in the folder of a corpus. If a file matches, `open_corpus("CORPUS/val")` opens the split
val, also where the files of the split are `CORPUS/val_…`, as in format primer."""


def convert(
    corpus: str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: str,
    *,
    tokenizer: str | None = None,
    dtype: TokenDtype | None = None,
    eos_token_id: int | None = None,
    part_bytes: int = GIB,
    shard_tokens: int = 50_000_000,
    without: Iterable[int | str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the documents of a corpus in another format: the split train and, if the corpus has one, the split val.

    Args:
      corpus: Path of a corpus, as `open_corpus` takes it, such as a folder or a prefix of Megatron's files.
      output: Folder that does not exist, is empty, or has an earlier output (see `overwrite`).
      format: Name of the output's format in `FORMATS`, or package.module:Name.
      tokenizer: Path of the corpus's tokenizer; by default, the tokenizer in the corpus's folder, if the folder has one.
      dtype: Dtype of headerless tokens, as in `open_corpus`.
      eos_token_id: Token that ends a document, for a corpus that does not state where its documents end.
      part_bytes: Bytes of tokens in one token file, for format olmo.
      shard_tokens: Tokens in one shard, for format episodes.
      without: Documents that are left out. An entry is the number of a document, `INPUT:LINE`, a whole input, or a file that
        has one entry on each line. Numbers count through the splits: if train has 100 documents, number 100 is the first
        document of val.
      overwrite: Whether to replace an earlier output that was made from other documents or options.
      progress: Function that is called with the name of the work, the number of finished tasks, and the number of all tasks.

    Returns:
      The output's manifest. If the output has the same documents and options already, nothing is written, and the manifest has
      one more item, "already": True.

    Raises:
      CorpusError, CorpusFileError: The corpus can't be read, or has no documents, or is a blend (a mixture with weights).
      PrepareError: The format can't hold the documents, no document is left, or the output has another corpus.
      StorageError: The output can't be written, or would replace a file of the corpus.
      RowIndexError: A document of `without` does not exist.
    """
    writer = FORMATS[format]
    target = Target(output)
    where = files.normalize(corpus)
    target.check_writable()
    splits = _open(where, writer, dtype=dtype, eos_token_id=eos_token_id)
    # the output must not replace a file of the old corpus
    files.check_inputs_stay(target.output, (file.path for part in splits.values() for file in part.files()))
    loaded = _tokenizer(where, tokenizer, splits.values())
    documents = _CorpusDocuments(where, splits, keep_empty=writer.holds_empty, without=without)
    description = documents.describe_tokenizer() if loaded is None else loaded.description()
    request = documents.request(tokenizer, format, part_bytes=part_bytes, shard_tokens=shard_tokens)
    identity = documents.identity(request, description, writer.code)

    def make() -> dict[str, Any]:
        plan = documents.plan(target.stage, request, description)
        with target.discarded_if_refused():
            tasks = writer.tasks_of(plan)
            run_steps("Writing", write_tasks(plan, tasks), len(tasks), progress)
        return finish(plan, identity, {} if loaded is None else loaded.files(), documents.counts())

    return target.produce(identity, make, overwrite=overwrite)


def format_of(corpus: str | os.PathLike[str]) -> str:
    """Return the name of the format that a prepared corpus was written in.

    Raises:
      PrepareError: The corpus has no manifest that states a format.
    """
    where = files.normalize(corpus)
    name = str(_manifest(where).get("format"))
    if name not in FORMATS and ":" not in name:  # "package.module:Name" is a format of another package
        fix = "Check the path of the corpus, or give the format of the output (--format)"
        raise PrepareError(f"{files.join(where, MANIFEST)}: does not exist or states no format. {fix}.")
    return name


def _manifest(where: str) -> dict[str, Any]:
    path = files.join(where, MANIFEST)
    return read_object(path) if files.exists(path) else {}


class _CorpusDocuments(Documents):
    """Documents of the old corpus, which is at the path `where`. Part 0 is the split train, and part 1 the split val.

    Attributes:
      corpora: Corpus of each part.
      manifest: Content of the old corpus's prepare.json; {} if it has none.
      source_names: Names of the sources of all parts.
      first_sources: Index in `source_names` of the first source of each part. A source is an input from which documents were
        made.
      ids: Numbers of the documents that are written, by split.
      withdrawn: Numbers of the documents that `without` names.
      dropped: Number of empty documents that are left out because the new format can't hold them (`keep_empty` is False).
    """

    def __init__(self, where: str, corpora: dict[str, Corpus], keep_empty: bool, without: Iterable[int | str]) -> None:
        self.where = where
        self.corpora = list(corpora.values())
        self.manifest = _manifest(where)
        names = [corpus.source_names or (where,) for corpus in self.corpora]
        # the splits of one preparation have the same sources; other splits have sources of their own
        self.source_names = names[0] if names[0] == names[-1] else (*names[0], *names[1])
        self.first_sources = (0, len(self.source_names) - len(names[-1]))
        lengths = np.concatenate([corpus.documents.length for corpus in self.corpora])
        starts = np.concatenate([corpus.documents.start for corpus in self.corpora])
        firsts = np.cumsum([0, *(len(corpus.documents) for corpus in self.corpora)])
        loss_dtype = np.dtype(np.float32 if any(corpus.has_weights for corpus in self.corpora) else np.bool_)
        token_dtype = np.result_type(*(corpus.dtype for corpus in self.corpora))
        super().__init__(lengths, starts, firsts, token_dtype, loss_dtype)
        self.withdrawn = corpus_documents_named(self.corpora, without)
        kept = np.delete(np.arange(len(lengths)), self.withdrawn)
        written = kept if keep_empty else kept[lengths[kept] > 0]
        # `firsts[1:-1]` has the number of val's first document, if there is a val
        self.ids = dict(zip(corpora, np.split(written, np.searchsorted(written, firsts[1:-1])), strict=True))
        self.dropped = len(kept) - len(written)
        if not len(self.ids["train"]):
            raise PrepareError(f"{where}: no document of split train is left. Leave fewer out.")

    def request(self, tokenizer: str | None, format: str, **sizes: Any) -> Request:
        """Return the request of the new corpus, with "convert" in place of a template.

        `sizes` are `part_bytes` and `shard_tokens`.
        """
        tokenizer = tokenizer or self.corpora[0].tokenizer or ""
        source = str((self.manifest.get("request") or {}).get("source") or "")
        val_frac = len(self.ids.get("val", ())) / max(1, len(self.lengths))
        return Request((Dataset((self.where,)),), "convert", tokenizer, format, val_frac=val_frac, source=source, **sizes)

    def describe_tokenizer(self) -> dict[str, Any]:
        """Return the description of an unknown tokenizer, from the metadata of the corpus and its highest token id."""
        corpus = self.corpora[0]
        highest_tokens = (int(block.tokens.max(initial=0)) for ids in self.ids.values() for block in self.blocks(ids))
        return {
            "kind": "unknown",
            "sha256": corpus.tokenizer_sha256,
            "vocab_size": max(corpus.eos_token_id or 0, corpus.pad_token_id or 0, *highest_tokens) + 1,
            "eos_token_id": corpus.eos_token_id,
            "pad_token_id": corpus.pad_token_id,
        }

    def identity(self, request: Request, tokenizer: Mapping[str, Any], code: list[str]) -> dict[str, Any]:
        """Return all that decides the output, as JSON. The key depends on all bytes of the old corpus.

        `code` is the `Format.code` of the new format.
        """
        options = request.as_dict()
        if len(self.withdrawn):
            options["without"] = f"{len(self.withdrawn)} documents ({artifact.hash_of(self.withdrawn.tolist())[:16]})"
        contents = {name: corpus.content_hash() for name, corpus in zip(self.ids, self.corpora, strict=True)}
        inputs = self.manifest.get("inputs") or [{"path": name} for name in self.source_names]
        key = artifact.hash_of([options, contents, tokenizer, *code])
        identity = {"key": key, "request": options, "inputs": inputs, "tokenizer": tokenizer}
        return identity | ({"code": {f"format {request.format}": code}} if code else {})

    def counts(self) -> dict[str, Any]:
        """Return the counts of the new manifest. The EOS counts are the old manifest's, or None if documents are withdrawn."""
        old = {} if len(self.withdrawn) else self.manifest
        eos_counts = {name: old.get(name) for name in ("without_final_eos", "with_inner_eos")}
        dropped = {"no token, which this format can't hold": self.dropped, "withdrawn": len(self.withdrawn)}
        # tokens that no document has, such as those between two documents
        outside = sum(corpus.num_tokens for corpus in self.corpora) - int(self.lengths.sum())
        dropped["tokens outside of documents"] = max(0, outside)  # documents of format episodes may overlap
        return {"dropped": {reason: count for reason, count in dropped.items() if count}, "rejected": 0, **eos_counts}

    def plan(self, folder: str, request: Request, tokenizer: Mapping[str, Any]) -> Plan:
        """Return the plan of the new corpus. Read the loss of all documents, to count the tokens that take loss."""
        statistics, binary = {}, True
        for (name, ids), corpus in zip(self.ids.items(), self.corpora, strict=True):
            without_loss = 0
            for block in self.blocks(ids) if corpus.has_loss else ():
                without_loss += int(np.count_nonzero(block.loss == 0))
                binary = binary and bool(((block.loss == 0) | (block.loss == 1)).all())
            tokens = int(self.lengths[ids].sum())
            statistics[name] = SplitStatistics(len(ids), tokens, tokens - without_loss)
        masked = any(corpus.has_loss for corpus in self.corpora)
        return Plan(folder, request, tokenizer, self, self.ids, statistics, binary, self.source_names, masked=masked)

    def readers(self, parts: Sequence[int]) -> Iterable[Reader]:
        return (functools.partial(self._read, part) for part in parts)

    def _read(self, part: int, start: int, tokens: npt.NDArray[Any], loss: npt.NDArray[Any]) -> None:
        tokens[:], stored_loss = self.corpora[part].read(start, start + len(tokens))
        loss[:] = True if stored_loss is None else stored_loss

    def sources(self, ids: Ids) -> Iterator[npt.NDArray[np.int64]]:
        """See `Documents.sources`. All of `ids` are in one split.

        If a split has no sources, its fifth document has line 5 of the split's first source.
        """
        if len(ids):
            split = int(self.parts_of(ids[:1])[0])
            numbers = ids - self.firsts[split]
            sources = self.corpora[split].sources
            pairs = np.stack([np.zeros_like(numbers), numbers + 1], axis=1) if sources is None else sources[numbers]
            # a split numbers its own sources from 0; the new corpus numbers `source_names`
            yield pairs + np.array([self.first_sources[split], 0])


def _open(where: str, writer: Format, **options: Any) -> dict[str, Corpus]:
    """Return the corpora of the splits by name. Raise an error if they can't be converted."""
    train = open_corpus(where, **options)
    if train.weights:
        raise CorpusError(f"{where}: the weights of a blend are not converted. Give a prefix, or a folder of prefixes.")
    val = files.glob(files.join(glob.escape(where), "*.eval.parquet"))  # the split val in format openchat
    if any(files.glob(files.join(glob.escape(where), pattern)) for pattern in VALIDATION):
        val = [files.join(where, "val")]
    splits = {"train": train, "val": open_corpus(val[0], **options)} if val else {"train": train}
    if any(corpus.of_pairs for corpus in splits.values()):
        raise PrepareError(f"{where}: preference pairs are not converted. Prepare their records in another format.")
    if writer.of_pairs:
        raise PrepareError(f"{where}: holds no preference pairs, but the new format does. Choose another format.")
    return splits


def _tokenizer(where: str, path: str | None, corpora: Iterable[Corpus]) -> Tokenizer | None:
    """Return the tokenizer at `path`; by default the tokenizer in the corpus's folder, or None if the folder has none."""
    if path is None:
        folder = files.join(where, "tokenizer")
        return load_tokenizer(folder) if files.exists(folder) else None
    for corpus in corpora:
        check_tokenizer(corpus, path)
    return load_tokenizer(path)
