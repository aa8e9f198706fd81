"""Corpora: which tokens and documents are on disk, and in which formats."""

from grain_sft.corpus import content
from grain_sft.corpus.boundary_documents import read_unjoined_documents
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.data import CorpusData
from grain_sft.corpus.document_finder import DocumentFinder
from grain_sft.corpus.documents import SOURCE_BYTES, Document, Documents, read_sources
from grain_sft.corpus.formats import FORMATS, DirectoryListing, Format, ReadOptions, Split, TokenFile, rows
from grain_sft.corpus.formats.megatron import PREFIX_SUFFIX, split_range, words_of
from grain_sft.corpus.formats.metadata import LABEL_MASKS, SPLIT, CorpusMetadata, Json, prepare_manifest, split_metadata
from grain_sft.corpus.formats.openchat import METADATA_KEY
from grain_sft.corpus.formats.pairs import pair_lengths
from grain_sft.corpus.formats.scanning import SUBSETS, scan_corpus
from grain_sft.corpus.loss import IGNORED, KINDS, LossFile, LossReader
from grain_sft.corpus.mixture import MixtureCorpus
from grain_sft.corpus.open import check_tokenizer, open_corpus
from grain_sft.corpus.output_check import check_corpus_stays
from grain_sft.corpus.row_format import RowFormat, are_long
from grain_sft.corpus.shard import Shard, TokenDtype, check_signed

__all__ = [
    "FORMATS", "IGNORED", "KINDS", "LABEL_MASKS", "METADATA_KEY", "PREFIX_SUFFIX", "SOURCE_BYTES", "SPLIT", "SUBSETS", "Corpus",
    "CorpusData", "CorpusMetadata", "DirectoryListing", "Document", "DocumentFinder", "Documents", "Format", "Json", "LossFile",
    "LossReader", "MixtureCorpus", "ReadOptions", "RowFormat", "Shard", "Split", "TokenDtype", "TokenFile", "are_long",
    "check_corpus_stays", "check_signed", "check_tokenizer", "content", "open_corpus", "pair_lengths", "prepare_manifest",
    "read_sources", "read_unjoined_documents", "rows", "scan_corpus", "split_metadata", "split_range", "words_of",
]  # fmt: skip
