"""Comparisons with the installed originals, which the makers of golden files call."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "golden/make"))
