"""What stands beside a corpus: its prepare.json and its tokenizer, and so how large its vocabulary is."""

from __future__ import annotations

from collections.abc import Iterator

from grain_sft.corpus import PREPARE, Corpus, Json
from grain_sft.errors import GrainSftError, MissingExtraError
from grain_sft.storage import files
from grain_sft.verify.finding import Report


def folders_of(corpus: Corpus, where: str) -> Iterator[str]:
    """Folders in which what belongs to a corpus may stand: what was asked for, and those around its first file."""
    if where:
        yield where
        yield files.parent(where)
    yield from files.candidate_dirs(corpus.shards[0].path)


def manifest_of(corpus: Corpus, where: str) -> Json | None:
    """The prepare.json of a corpus; None where there is none.

    Raises:
      CorpusError: it is damaged.
    """
    for folder in folders_of(corpus, where):
        path = files.join(folder, PREPARE)
        if files.exists(path):
            return Json.load(path)
    return None


def check_tokenizer(report: Report, corpus: Corpus, where: str) -> int | None:
    """Check the tokenizer beside a corpus against the hash that the corpus gives; returns its vocabulary size, where
    there is one that can be loaded."""
    from grain_sft.prepare import load_tokenizer  # with it come tokenizers

    for folder in folders_of(corpus, where):
        path = files.join(folder, "tokenizer")
        if not files.exists(path):
            continue
        try:
            tokenizer = load_tokenizer(path)
        except MissingExtraError as error:
            report.note("vocabulary", path, f"the tokenizer was not checked: {error}")
            return None
        except GrainSftError as error:
            report.wrong("vocabulary", path, str(error))
            return None
        if corpus.tokenizer_sha256 not in (None, tokenizer.sha256):
            report.wrong(
                "vocabulary",
                path,
                f"is another tokenizer (sha256 {tokenizer.sha256}) than the corpus was made with "
                f"({corpus.tokenizer_sha256}). Put that one there.",
            )
            return None
        return tokenizer.vocab_size
    return None


def vocabulary_size(report: Report, corpus: Corpus, where: str, manifest: Json | None) -> int | None:
    """How many ids there are: as prepare.json says, or the tokenizer beside the corpus; None where neither does."""
    stated = None if manifest is None else manifest.object("tokenizer").count("vocab_size")
    size = check_tokenizer(report, corpus, where) if report.full or stated is None else None
    found = size if stated is None else stated
    if found is None:
        report.note(
            "vocabulary",
            corpus.shards[0].path,
            "how large the vocabulary is, is not known: no prepare.json and no folder 'tokenizer' stand beside the corpus. "
            "Give vocab_size (--vocab-size) to have the ids checked.",
        )
    return found
