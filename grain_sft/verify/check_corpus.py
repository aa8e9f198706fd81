"""Verification of a corpus: its files, boundaries, vocabulary, loss and documents."""

import glob
import itertools
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, Json, prepare_manifest
from grain_sft.errors import GrainSftError, MissingExtraError
from grain_sft.provenance import find_tokenizer, tokenizer_of
from grain_sft.storage import MANY_THREADS, Count, FileStamp, describe, file_stamp, files, in_threads
from grain_sft.types import Ints
from grain_sft.verify import content
from grain_sft.verify.finding import Report

_NEARLY_ALL = 0.95  # if this share of documents ends with the same token, this token is the template's own end token
_SPLITS = dict[str, dict[str, Count]]  # type of the counts of each split in prepare.json
_ENDS_CHECKED = 1000  # documents whose first and last tokens a fast check reads


class VocabularyCheck:
    """Search for token ids of at least `size`, block by block. If `size` is None, only the highest id is reported."""

    def __init__(self, corpus: Corpus, size: int | None) -> None:
        self._corpus, self._size = corpus, size
        self._too_high: dict[int, tuple[int, int, int]] = {}
        """By shard: index in the corpus of the first id that is too high, this id, and number of such ids."""
        self._highest = -1

    def check(self, begin: int, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Check `tokens`, a block that begins at token `begin` of the corpus."""
        highest = int(tokens.max(initial=0))
        self._highest = max(self._highest, highest)
        if self._size is None or highest < self._size:
            return
        too_high = np.flatnonzero(tokens >= self._size)  # indices in the block
        shard_of_each = self._corpus.shard_borders.searchsorted(begin + too_high, side="right") - 1
        shards, firsts, counts = np.unique(shard_of_each, return_index=True, return_counts=True)
        for shard, first, added in zip(shards.tolist(), too_high[firsts].tolist(), counts.tolist(), strict=True):
            # keep the index and the id of an earlier block
            index, token, count = self._too_high.get(shard, (begin + first, int(tokens[first]), 0))
            self._too_high[shard] = index, token, count + added

    def report(self, report: Report) -> None:
        """Add the highest id, and a wrong finding for each shard with ids that are too high."""
        report.figures["highest_token"] = self._highest
        for shard, (index, token, count) in self._too_high.items():
            more = f"; {count - 1:,} more ids in this file are too high" if count > 1 else ""
            sentence = f"is {token}, but the vocabulary has {self._size} ids{more}. Correct the dtype or the tokenizer."
            place = f"token {index - self._corpus.shard_borders[shard]}"
            report.wrong("vocabulary", self._corpus.shards[shard].path, sentence, place)


def check_corpus(report: Report, corpus: Corpus, where: str, vocab_size: int | None) -> int | None:
    """Check a corpus, and return the size of its vocabulary; None if it is unknown.

    Args:
      where: Path at which the corpus was opened; "" for a corpus of a config.
      vocab_size: Size of the vocabulary. None means the size that prepare.json or the tokenizer states.
    """
    report.figures |= {"shards": len(corpus.shards), "tokens": corpus.num_tokens}
    report.figures["fingerprint"] = corpus.ends_fingerprint
    if not _check_files(report, corpus):
        return vocab_size
    manifest, path = None, corpus.shards[0].path
    with report.errors("statistics", where):
        manifest_path = prepare_manifest(path)
        if manifest_path is not None:
            manifest = Json.load(manifest_path)
        if vocab_size is None:
            vocab_size = _vocabulary_size(report, corpus, where, manifest)
        # prepare.json has the counts of all files of a split, whose names differ only in numbers. They are not compared if the
        # corpus has other files.
        home = files.parent(manifest_path or path)
        pattern = glob.escape(home) + re.sub(r"\d", "[0-9]", glob.escape(path.removeprefix(home)))
        if manifest is not None and files.glob(pattern) != sorted(shard.path for shard in corpus.shards):
            manifest = None
    for name, number in (("eos_token_id", corpus.eos_token_id), ("pad_token_id", corpus.pad_token_id)):
        if number is not None and vocab_size is not None and number >= vocab_size:
            report.wrong("vocabulary", path, f"{name} is {number}, but the vocabulary has {vocab_size} ids. Correct it.")
    if report.full:
        content.check_loss_values(report, corpus)
        if corpus.rows is not None:
            content.check_written_rows(report, corpus)
    located = _has_documents(report, corpus)  # whether the ends of documents are known
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
    """Compare the size and the digest of each file with those in the corpus. Return whether all match."""
    distinct = {file.path: file for file in corpus.files()}

    def check(file: FileStamp) -> str:
        """Return a sentence about a file that changed or can't be read; "" for an unchanged file."""
        try:
            found = describe(file.path, file.data_offset)
        except GrainSftError as error:
            return str(error)
        if found.size != file.size:
            return file_stamp.size_change(file, found.size)
        return "" if found.digest == file.digest else file_stamp.replaced(file)

    for path, sentence in zip(distinct, in_threads(check, distinct.values(), threads=MANY_THREADS), strict=True):
        if sentence:
            report.wrong("files", path, sentence)
    report.figures |= {"files": len(distinct), "bytes": sum(file.size for file in distinct.values())}
    return not report.has_wrong("files")


def _has_documents(report: Report, corpus: Corpus) -> bool:
    """Check the documents, and return whether their ends are known. A fast check does not search for EOS tokens."""
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
        num_inputs = len(corpus.source_names)
        wrong = (sources[:, 0] < 0) | (sources[:, 1] < 1) | ((num_inputs > 0) & (sources[:, 0] >= num_inputs))
        inputs = f"an input from 0 to {num_inputs - 1}" if num_inputs else "an input from 0 on"
        for number in np.flatnonzero(wrong).tolist():
            origin = f"comes from input {sources[number, 0]}, line {sources[number, 1]}"
            sentence = f"{origin}; expected {inputs}, and a line from 1 on. Prepare the corpus again."
            report.wrong("boundaries", corpus.sources_file.path, sentence, f"document {number}")
    return True


def _path_in(corpus: Corpus, error: GrainSftError) -> str:
    """Return the path of the corpus's file that an error message names; "" if it names none."""
    # the longest, because a message about `a/10` also contains `a/1`
    return max((file.path for file in corpus.files() if file.path in str(error)), key=len, default="")


def _check_all_documents(report: Report, corpus: Corpus, vocabulary: VocabularyCheck, manifest: Json | None) -> None:
    """Read all tokens. Check their ids, the ends of documents and the counts of prepare.json, and find duplicates."""
    scanned = content.scan_documents(corpus, vocabulary.check)
    vocabulary.report(report)
    length, path = corpus.documents.length, corpus.shards[0].path
    nonempty = np.flatnonzero(length > 0)
    _check_eos(report, corpus, nonempty, scanned.first[nonempty], scanned.last[nonempty])
    trainable = int(scanned.trainable.sum())
    # prepare.json counts with the loss files, which this corpus may ignore
    _check_statistics(report, corpus, manifest, None if corpus.ignores_loss else trainable)
    duplicates = content.find_duplicates(scanned.hash, length)
    without_loss = nonempty[scanned.trainable[nonempty] == 0]
    report.figures |= {"trainable_tokens": trainable, "duplicate_documents": duplicates.documents}
    report.figures |= {"duplicate_tokens": duplicates.tokens, "empty_documents": len(length) - len(nonempty)}
    report.figures["documents_without_loss"] = len(without_loss)
    # notes, because duplicates and documents without loss may be intended
    if duplicates.first is not None:
        sentence = f"{duplicates.documents:,} documents ({duplicates.tokens:,} tokens) have the same tokens as another document"
        pair = "documents {} and {}".format(*duplicates.first)
        report.note("duplicates", path, f"{sentence}, in {duplicates.groups:,} groups; the first are {pair}.")
    if len(without_loss):
        report.note("loss", path, f"{len(without_loss):,} documents take no loss; the first is document {without_loss[0]}.")


def _check_tokens(report: Report, corpus: Corpus, vocabulary: VocabularyCheck) -> None:
    """Check the ids of all tokens in a full check, and of the tokens at both ends of each shard in a fast check."""
    block = content.BLOCK_TOKENS if report.full else file_stamp.DIGEST_BYTES // corpus.dtype.itemsize
    spans: list[tuple[int, int]] = []
    for begin, end in itertools.pairwise(corpus.shard_borders.tolist()):
        starts = range(begin, end, block) if report.full else sorted({begin, max(begin, end - block)})
        spans += [(start, min(start + block, end)) for start in starts]
    # small blocks are read at the same time, because a bucket takes 50 ms to answer a request
    borders = zip(*spans, strict=True)
    read = map(corpus.read, *borders) if report.full else in_threads(corpus.read, *borders, threads=MANY_THREADS)
    for (start, _), (tokens, _) in zip(spans, read, strict=True):
        vocabulary.check(start, tokens)
    vocabulary.report(report)


def _check_some_documents(report: Report, corpus: Corpus) -> None:
    """Check the first and last tokens of evenly spaced documents."""
    start, length = corpus.documents
    some = np.flatnonzero(length > 0)
    some = some[np.unique(np.linspace(0, len(some) - 1, _ENDS_CHECKED).astype(np.int64))] if len(some) else some
    ends = np.concatenate([start[some], start[some] + length[some] - 1])
    tokens = [tokens[0] for tokens, _ in in_threads(corpus.read, ends, ends + 1, threads=MANY_THREADS)]
    first, last = np.array(tokens).astype(np.int64).reshape(2, -1)
    _check_eos(report, corpus, some, first, last)


def _check_eos(report: Report, corpus: Corpus, numbers: Ints, first: Ints, last: Ints) -> None:
    """Check that the documents `numbers` end with EOS, given their first and last tokens.

    In two cases, documents that do not end with EOS are only noted. First, if they are at most half of `numbers`, they may have
    been cut. Second, boundary files may state the ends, and nearly all documents that `prepare` did not cut may end with one
    other token. This is then the end token of their template.
    """
    eos, boundaries = corpus.eos_token_id, corpus.shards[0].boundaries
    ends_wrong = last != eos
    if eos is None or not ends_wrong.any():
        return
    # `shifted` begin with the EOS of the document before, as if the boundaries were a token too early
    unended, shifted = numbers[ends_wrong], numbers[ends_wrong & (first == eos)]
    last_tokens, counts = np.unique(last, return_counts=True)
    end, most = last_tokens[counts.argmax()], counts.max()  # most frequent last token, and number of documents with it
    is_template = boundaries is not None and most >= (_NEARLY_ALL - _share_cut(corpus)) * len(last)
    path, checked = (boundaries or corpus.shards[0]).path, f"of {len(numbers):,} documents checked"
    sentence = f"{len(unended):,} {checked} don't end with the EOS token {eos}; the first is document {unended[0]}"
    if len(shifted) * 2 > len(numbers):
        sentence = f"{len(shifted):,} {checked} begin with EOS ({eos}). The boundaries are shifted by a token. Correct them."
        report.wrong("boundaries", path, sentence, f"document {shifted[0]}")
    elif len(unended) * 2 <= len(numbers) or (is_template and end == eos):
        report.note("boundaries", path, f"{sentence}. This is right for documents that were cut.")
    elif is_template:
        sentence = f"{most:,} {checked} end with the token {end}, not with EOS ({eos})"
        report.note("boundaries", path, f"{sentence}. OLMo-core splits files at EOS: it would not find these ends.")
    else:
        reason = f"ends with {last[ends_wrong][0]}. Give the boundaries of these tokens, or the right eos_token_id."
        report.wrong("boundaries", path, f"{sentence}, which {reason}", f"document {unended[0]}")


def _share_cut(corpus: Corpus) -> float:
    """Return the share of documents that `prepare` cut, from prepare.json; 0 without this file."""
    path = prepare_manifest(corpus.shards[0].path)
    splits: dict[str, dict[str, int]] = {} if path is None else Json.load(path).get("splits", _SPLITS) or {}
    cut, documents = (sum(split.get(name, 0) for split in splits.values()) for name in ("truncated", "documents"))
    return cut / max(1, documents)


def _check_statistics(report: Report, corpus: Corpus, manifest: Json | None, trainable: int | None) -> None:
    """Check that a split in prepare.json has the corpus's counts. If `trainable` is None, its count is not compared."""
    if manifest is None:
        return
    counts: dict[str, int | None] = {"documents": len(corpus.documents), "tokens": int(corpus.documents.length.sum())}
    if trainable is not None:
        counts["trainable_tokens"] = trainable
    with report.errors("statistics", manifest.path):
        splits = manifest.get("splits", _SPLITS) or {}
        stated = [{name: split.get(name) for name in counts} for split in splits.values()]
        # a count that prepare.json does not state is None, and fits
        fits = [all(split[name] in (None, count) for name, count in counts.items()) for split in stated]
        if stated and not any(fits):
            sentence = f"states {'; or '.join(map(_listed, stated))}, but the files hold {_listed(counts)}."
            report.wrong("statistics", manifest.path, f"{sentence} Prepare the corpus again, or remove this file.")


def _listed(counts: Mapping[str, int | None]) -> str:
    """Return counts as text, such as "3 documents, 900 tokens"."""
    return ", ".join(f"{value} {name}" for name, value in counts.items() if value is not None)


def _vocabulary_size(report: Report, corpus: Corpus, where: str, manifest: Json | None) -> int | None:
    """Return the number of ids that prepare.json or else the tokenizer states. If neither does, add a note."""
    size = None if manifest is None else manifest.object("tokenizer").count("vocab_size")
    if size is None or report.full:
        own = _check_tokenizer(report, corpus, where)
        size = own if size is None else size
    if size is None:
        sentence = "the ids were not checked: neither prepare.json nor a tokenizer states the vocabulary's size"
        report.note("vocabulary", corpus.shards[0].path, f"{sentence}. Give vocab_size (--vocab-size).")
    return size


def _check_tokenizer(report: Report, corpus: Corpus, where: str) -> int | None:
    """Return the number of ids of the tokenizer next to a corpus, or None if it is missing or unusable.

    If the tokenizer can't be loaded, or the corpus was made with another tokenizer, add a wrong finding. If the package that
    loads the tokenizer is not installed, add a note.
    """
    candidates = [files.join(folder, "tokenizer") for folder in (where, files.parent(where))] if where else []
    path = next(filter(files.exists, candidates), None) or find_tokenizer(corpus)
    if path is None:
        return None
    with report.errors("vocabulary", path):
        try:
            return tokenizer_of(corpus, path).vocab_size
        except MissingExtraError as error:
            report.note("vocabulary", path, f"the tokenizer was not checked: {error}")
    return None
