"""Checks of a corpus, a plan or a config, as `grain-sft verify` runs them."""

from grain_sft.verify.finding import Finding, Report
from grain_sft.verify.verify import KINDS, verify

__all__ = ["KINDS", "Finding", "Report", "verify"]
