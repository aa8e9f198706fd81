"""Verification of a corpus: its files, boundaries, vocabulary, loss and documents."""

import concurrent.futures
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import THREADS, Corpus, Json, prepare_manifest
from grain_sft.errors import GrainSftError, MissingExtraError
from grain_sft.provenance import find_tokenizer, tokenizer_of
from grain_sft.storage import DIGEST_BYTES, FileStamp, describe, files, replaced, size_change
from grain_sft.verify import content
from grain_sft.verify.finding import Report

Ints = npt.NDArray[np.int64]

_NEARLY_ALL = 0.95  # of the documents
_ENDS_CHECKED = 1000  # documents in a fast check


class VocabularyCheck:
    """Search, a block at a time, for ids that are too high: finds the first of each shard, and their number."""

    def __init__(self, corpus: Corpus, size: int | None) -> None:
        self._begins = np.cumsum([0, *(shard.num_tokens for shard in corpus.shards)])
        self._corpus, self._size = corpus, size
        self._found: dict[int, tuple[int, int, int]] = {}
        """By shard: the first token that is too high, its id, and their number."""
        self._highest = -1

    def check(self, begin: int, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Check `tokens`, from the corpus's token `begin` on."""
        highest = int(tokens.max(initial=0))
        self._highest = max(self._highest, highest)
        if self._size is None or highest < self._size:
            return
        at = np.flatnonzero(tokens >= self._size)
        shards = self._begins.searchsorted(at + begin, side="right") - 1
        for shard, first, more in zip(*np.unique(shards, return_index=True, return_counts=True), strict=True):
            new = int(begin + at[first] - self._begins[shard]), int(tokens[at[first]]), 0
            place, token, count = self._found.get(int(shard), new)
            self._found[int(shard)] = place, token, count + int(more)

    def report(self, report: Report) -> None:
        """Add what was found to a report."""
        report.figures["highest_token"] = self._highest
        for shard, (place, token, count) in self._found.items():
            more = f"; {count - 1:,} more in this file are too high" if count > 1 else ""
            sentence = f"is {token}, but the vocabulary has {self._size} ids{more}. Correct the dtype or the tokenizer."
            report.wrong("vocabulary", self._corpus.shards[shard].path, sentence, f"token {place}")


def check_corpus(report: Report, corpus: Corpus, where: str, vocab_size: int | None) -> int | None:
    """Check the corpus that was opened at `where`. Return its vocabulary size, or None if that is unknown."""
    report.figures |= {"shards": len(corpus.shards), "tokens": corpus.num_tokens}
    report.figures["fingerprint"] = corpus.ends_fingerprint
    if not _check_files(report, corpus):
        return vocab_size
    manifest, path = None, corpus.shards[0].path
    with report.errors("statistics", where):
        if (stated := prepare_manifest(path)) is not None:
            manifest = Json.load(stated)
        if vocab_size is None:
            vocab_size = _vocabulary_size(report, corpus, where, manifest)
        if where == path or prepare_manifest(corpus.shards[-1].path) != stated:
            manifest = None  # one file of a corpus, or several corpora
    for name, number in (("eos_token_id", corpus.eos_token_id), ("pad_token_id", corpus.pad_token_id)):
        if number is not None and vocab_size is not None and number >= vocab_size:
            report.wrong("vocabulary", path, f"{name} is {number}, but the vocabulary has {vocab_size} ids.")
    if report.full:
        content.check_loss_values(report, corpus)
        if corpus.rows is not None:
            content.check_written_rows(report, corpus)
    located = _has_documents(report, corpus)
    vocabulary = VocabularyCheck(corpus, vocab_size)
    try:
        if located and report.full:
            _check_all_documents(report, corpus, vocabulary, manifest)
        else:
            _check_tokens(report, corpus, vocabulary)
            if located:
                _check_some_documents(report, corpus)
                _check_statistics(report, corpus, manifest, None)
    except GrainSftError as error:
        report.wrong("files", _path_in(corpus, error), str(error))
    return vocab_size


def _check_files(report: Report, corpus: Corpus) -> bool:
    """Compare the size and both ends of every file with the index, and return whether all match."""
    distinct = {file.path: file for file in corpus.files()}

    def check(file: FileStamp) -> str:
        try:
            found = describe(file.path, file.data_offset)
        except GrainSftError as error:
            return str(error)
        if found.size != file.size:
            return size_change(file, found.size)
        return "" if found.digest == file.digest else replaced(file)

    with concurrent.futures.ThreadPoolExecutor(min(THREADS, len(distinct))) as pool:
        for path, sentence in zip(distinct, pool.map(check, distinct.values()), strict=True):
            if sentence:
                report.wrong("files", path, sentence)
    report.figures |= {"files": len(distinct), "bytes": sum(file.size for file in distinct.values())}
    return not report.has_wrong("files")


def _has_documents(report: Report, corpus: Corpus) -> bool:
    """Return whether the documents are located. Only a full check searches the tokens for EOS."""
    path = corpus.shards[0].path
    if not corpus.has_boundary_files and corpus.eos_token_id is None:
        report.note("boundaries", path, "no boundary files and no eos_token_id: documents were not checked.")
        return False
    if not corpus.has_boundary_files and not report.full:
        return False
    try:
        documents, sources = corpus.documents, corpus.sources
    except GrainSftError as error:
        report.wrong("boundaries", _path_in(corpus, error) or path, str(error))
        return False
    inside = int(documents.length.sum())
    report.figures |= {"documents": len(documents), "tokens_in_documents": inside}
    if inside < corpus.num_tokens:
        report.note("boundaries", path, f"{corpus.num_tokens - inside:,} tokens are in no document.")
    if sources is not None and corpus.sources_file is not None:
        names = len(corpus.source_names)
        wrong = (sources[:, 0] < 0) | (sources[:, 1] < 1) | ((sources[:, 0] >= names) if names else False)
        for number in np.flatnonzero(wrong).tolist():
            found = f"comes from input {sources[number, 0]}, line {sources[number, 1]}, but there are {names} inputs."
            report.wrong("boundaries", corpus.sources_file.path, found, f"document {number}")
    return True


def _path_in(corpus: Corpus, error: GrainSftError) -> str:
    """Return the path of the corpus's file that an error message names; "" where it names none."""
    paths = (file.path for file in reversed(corpus.files()))  # a token file's path may begin another's
    return next((path for path in paths if path in str(error)), "")


def _check_all_documents(report: Report, corpus: Corpus, vocabulary: VocabularyCheck, manifest: Json | None) -> None:
    """Check every token and every document, in one pass. Note duplicates and documents without loss, which may be intended."""
    scanned = content.scan_documents(corpus, vocabulary.check)
    vocabulary.report(report)
    length, path, trainable = corpus.documents.length, corpus.shards[0].path, int(scanned.trainable.sum())
    nonempty = np.flatnonzero(length > 0)
    _check_eos(report, corpus, nonempty, scanned.first[nonempty], scanned.last[nonempty])
    _check_statistics(report, corpus, manifest, trainable)
    found = content.find_duplicates(scanned.hash, length)
    silent = np.flatnonzero((scanned.trainable == 0) & (length > 0))
    report.figures |= {"trainable_tokens": trainable, "duplicate_documents": found.documents}
    report.figures |= {"duplicate_tokens": found.tokens, "empty_documents": int(np.count_nonzero(length == 0))}
    report.figures["documents_without_loss"] = len(silent)
    if found.first is not None:
        sentence = f"{found.documents:,} documents ({found.tokens:,} tokens) have the tokens of another"
        pair = "documents {} and {}".format(*found.first)
        report.note("duplicates", path, f"{sentence}, in {found.groups:,} groups; the first are {pair}.")
    if len(silent):
        report.note("loss", path, f"{len(silent):,} documents take no loss; the first is document {silent[0]}.")


def _check_tokens(report: Report, corpus: Corpus, vocabulary: VocabularyCheck) -> None:
    """Check all ids in a full check, else those at both ends of each shard."""
    begin, most = 0, content.BLOCK_TOKENS if report.full else DIGEST_BYTES // corpus.dtype.itemsize
    for shard in corpus.shards:
        end = begin + shard.num_tokens
        starts = range(begin, end, most) if report.full else sorted({begin, max(begin, end - most)})
        for start in starts:
            vocabulary.check(start, corpus.read(start, min(start + most, end))[0])
        begin = end
    vocabulary.report(report)


def _check_some_documents(report: Report, corpus: Corpus) -> None:
    """Check the first and last tokens of evenly spaced documents."""
    start, length = corpus.documents
    some = np.flatnonzero(length > 0)
    some = some[np.unique(np.linspace(0, len(some) - 1, _ENDS_CHECKED).astype(np.int64))] if len(some) else some
    ends = np.stack([start[some], start[some] + length[some] - 1])
    tokens = [corpus.read(at, at + 1)[0][0] for at in ends.ravel().tolist()]
    first, last = np.array(tokens, np.int64).reshape(2, -1)
    _check_eos(report, corpus, some, first, last)


def _check_eos(report: Report, corpus: Corpus, numbers: Ints, first: Ints, last: Ints) -> None:
    """Check that documents end with EOS. Cut ones do not; if most do not, the boundaries or `eos_token_id` are wrong."""
    eos, boundaries = corpus.eos_token_id, corpus.shards[0].boundaries
    unended, shifted = numbers[last != eos], numbers[(first == eos) & (last != eos)]
    if eos is None or not len(unended):
        return
    path, checked = (boundaries or corpus.shards[0]).path, f"of {len(numbers):,} documents checked"
    sentence = f"{len(unended):,} {checked} don't end with the EOS token {eos}; the first is document {unended[0]}"
    tokens, counts = np.unique(last, return_counts=True)
    if len(shifted) * 2 > len(numbers):
        sentence = f"{len(shifted):,} {checked} begin with the EOS token {eos} and don't end with it. "
        sentence += "The boundaries are shifted by a token."
        report.wrong("boundaries", path, sentence, f"document {shifted[0]}")
    elif len(unended) * 2 <= len(numbers):
        report.note("boundaries", path, f"{sentence}. This is right for documents that were cut.")
    elif boundaries is not None and counts.max() >= _NEARLY_ALL * len(last):  # the template has an end token of its own
        sentence = f"{len(unended):,} {checked} end with the token {tokens[counts.argmax()]}, not with EOS ({eos}). "
        report.note("boundaries", path, sentence + "OLMo-core splits local files at EOS: it would not find these ends.")
    else:
        reason = f"ends with {last[last != eos][0]}. The boundaries are of other tokens, or eos_token_id is wrong."
        report.wrong("boundaries", path, f"{sentence}, which {reason}", f"document {unended[0]}")


def _check_statistics(report: Report, corpus: Corpus, manifest: Json | None, trainable: int | None) -> None:
    """Check that a split in prepare.json has the same counts of documents, tokens and trainable tokens."""
    if manifest is None:
        return
    found: dict[str, int | None] = {"documents": len(corpus.documents), "tokens": int(corpus.documents.length.sum())}
    if trainable is not None:
        found["trainable_tokens"] = trainable
    with report.errors("statistics", manifest.path):
        splits = manifest.object("splits")
        counts = [splits.object(split) for split in splits.data]
        stated = [{name: count.count(name) for name in found} for count in counts]
        if stated and all(any(entry[name] not in (None, found[name]) for name in found) for entry in stated):
            listed = "; or ".join(map(_listed, stated))
            sentence = f"states {listed}, but the files hold {_listed(found)}."
            report.wrong("statistics", manifest.path, f"{sentence} Prepare the corpus again, or remove this file.")


def _listed(counts: Mapping[str, int | None]) -> str:
    return ", ".join(f"{value} {name}" for name, value in counts.items() if value is not None)


def _vocabulary_size(report: Report, corpus: Corpus, where: str, manifest: Json | None) -> int | None:
    """Return the number of ids; None, with a note, where neither prepare.json nor a tokenizer states it."""
    stated = None if manifest is None else manifest.object("tokenizer").count("vocab_size")
    size = _check_tokenizer(report, corpus, where) if report.full or stated is None else None
    found = size if stated is None else stated
    if found is None:
        sentence = "the ids were not checked: neither prepare.json nor a folder 'tokenizer' is next to the corpus"
        report.note("vocabulary", corpus.shards[0].path, f"{sentence}. Give vocab_size (--vocab-size).")
    return found


def _check_tokenizer(report: Report, corpus: Corpus, where: str) -> int | None:
    """Check the tokenizer next to a corpus against the corpus's hash of it, and return its size if it can be loaded."""
    opened = [files.join(folder, "tokenizer") for folder in (where, files.parent(where))] if where else []
    path = next(filter(files.exists, opened), None) or find_tokenizer(corpus)
    if path is None:
        return None
    with report.errors("vocabulary", path):
        try:
            return tokenizer_of(corpus, path).vocab_size
        except MissingExtraError as error:
            report.note("vocabulary", path, f"the tokenizer was not checked: {error}")
    return None
