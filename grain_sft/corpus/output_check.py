"""Check that an output replaces no file of a corpus."""

import os
from collections.abc import Iterable

from grain_sft.corpus.data import CorpusData
from grain_sft.corpus.formats import DirectoryListing
from grain_sft.corpus.formats.files import BOUNDARIES, TOKEN_SUFFIXES, FileFormats
from grain_sft.corpus.formats.megatron import PREFIX_SUFFIX
from grain_sft.corpus.formats.metadata import TOKENIZER, folders_above
from grain_sft.errors import StorageError
from grain_sft.storage import files


def check_corpus_stays(output: str, corpus: CorpusData, named: Iterable[str] = ()) -> None:
    """Raise a StorageError if `output` is a file of `corpus`: of its tokens, metadata or tokenizer, or of another split.

    Args:
      output: Path of a file that is written.
      corpus: Corpus whose files stay.
      named: Paths, and texts that may be paths, with which the corpus was opened. `corpus` does not list the files of format
        openchat, because they are unpacked to the cache.
    """
    files.check_inputs_stay(output, (file.path for file in corpus.files()))
    path = files.real_path(output)
    # `output` is refused only if it has a name that files of corpora have, and is an existing file in a folder of this corpus.
    in_tokenizer = files.name_of(files.parent(path)) == TOKENIZER
    suffixes = (*TOKEN_SUFFIXES, BOUNDARIES, PREFIX_SUFFIX)
    if in_tokenizer or path.endswith(suffixes) or FileFormats(DirectoryListing()).is_metadata(path):
        folders = {folder for shard in corpus.shards for folder in folders_above(shard.path)}
        # of the texts in `named`, those with a slash may be paths
        folders |= {text if os.path.isdir(text) else files.parent(text) for text in named if "/" in text or os.path.isdir(text)}
        if not set(map(files.real_path, folders)).isdisjoint(folders_above(path)) and files.exists(path):
            raise StorageError(f"{path}: exists in the folder of the corpus, and may be one of its files. Give another output.")
