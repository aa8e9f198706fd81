"""Provenance: the documents that each step reads, the steps that read a document, and the audit log of a run."""

from grain_sft.provenance.audit import AuditLog
from grain_sft.provenance.audit_check import check_audit
from grain_sft.provenance.checkpoints import checkpoint_table, step_of_checkpoint, steps_between
from grain_sft.provenance.columns import numbers_of_document
from grain_sft.provenance.difference import Difference, difference
from grain_sft.provenance.line_checker import Checked, Finding
from grain_sft.provenance.lines import Trace, find_document, iter_trace, trace
from grain_sft.provenance.search import documents_with_text, find_tokenizer, tokenizer_of
from grain_sft.provenance.summary import summarize
from grain_sft.provenance.write import SUFFIXES, WRITERS, Columns, Labels, Writer, open_writer

__all__ = [
    "SUFFIXES", "WRITERS", "AuditLog", "Checked", "Columns", "Difference", "Finding", "Labels", "Trace", "Writer",
    "check_audit", "checkpoint_table", "difference", "documents_with_text", "find_document", "find_tokenizer", "iter_trace",
    "numbers_of_document", "open_writer", "step_of_checkpoint", "steps_between", "summarize", "tokenizer_of", "trace",
]  # fmt: skip
