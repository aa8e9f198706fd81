"""Verify: is a corpus, a plan or a config sound? `grain-sft verify` on the command line."""

from grain_sft.verify.finding import Finding, Report
from grain_sft.verify.verify import KINDS, verify

__all__ = ["KINDS", "Finding", "Report", "verify"]
