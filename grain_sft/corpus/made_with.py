"""Whether a corpus was made with the tokenizer that a config or a command names."""

from __future__ import annotations

from grain_sft.corpus.corpus import Corpus
from grain_sft.errors import CorpusError, MissingExtraError
from grain_sft.storage import files


def check_tokenizer(corpus: Corpus, given: str) -> None:
    """Refuse another tokenizer than the one that the corpus was made with.

    Args:
      corpus: with `tokenizer_sha256`, `tokenizer`, both or neither; with neither, any tokenizer passes.
      given: path of a tokenizer, which is compared by hash; else a name, which is compared with `corpus.tokenizer`.

    Raises:
      CorpusError: it is another one, or can't be compared.
      CorpusFileError: `given` is a path at which there is no tokenizer.
    """
    made_with = corpus.tokenizer
    if corpus.tokenizer_sha256 is None:
        if made_with is not None and not _is_same_name(made_with, given):
            raise CorpusError(_sentence(corpus, f"{made_with!r}", f"{given!r}"))
        return
    sha256 = _sha256_of(given)
    if sha256 is not None:
        if sha256 != corpus.tokenizer_sha256:
            named = (
                f"{made_with!r} (sha256 {corpus.tokenizer_sha256})"
                if made_with
                else f"sha256 {corpus.tokenizer_sha256}"
            )
            raise CorpusError(_sentence(corpus, named, f"{given!r} (sha256 {sha256})"))
    elif made_with is None:
        raise CorpusError(
            f"{corpus.shards[0].path}: the corpus records the hash of its tokenizer ({corpus.tokenizer_sha256}) but not its "
            f"name, so it can't be compared with {given!r}, which is not a file. Give the path of the tokenizer, or none."
        )
    elif not _is_same_name(made_with, given):
        raise CorpusError(_sentence(corpus, f"{made_with!r} (sha256 {corpus.tokenizer_sha256})", f"{given!r}"))


def _sentence(corpus: Corpus, made_with: str, given: str) -> str:
    return (
        f"{corpus.shards[0].path}: the corpus was made with the tokenizer {made_with}, but {given} is named. Name that one, or "
        "prepare the corpus again with the other."
    )


def _sha256_of(path: str) -> str | None:
    """The hash of the tokenizer at `path`; None where nothing is, or it can't be loaded for want of a library."""
    where = files.normalize(path)
    if not files.exists(where):
        return None
    from grain_sft.prepare import load_tokenizer  # only here: it is heavy, and most runs name no path

    try:
        return load_tokenizer(where).sha256
    except MissingExtraError:
        return None


def _is_same_name(one: str, other: str) -> bool:
    """Whether two names or paths are of one tokenizer: equal, or one ends with the other."""
    parts = [name.rstrip("/").removeprefix("./").split("/") for name in (one, other)]
    short, long = sorted(parts, key=len)
    return long[-len(short) :] == short
