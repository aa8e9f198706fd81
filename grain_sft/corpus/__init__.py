"""Corpus: what tokens and documents are on disk?"""

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.documents import Document, Documents
from grain_sft.corpus.loss import LossFile
from grain_sft.corpus.open import open_corpus
from grain_sft.corpus.shard import Shard

__all__ = ["Corpus", "Document", "Documents", "LossFile", "Shard", "open_corpus"]
