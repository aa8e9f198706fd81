"""Fixtures of the demo's tests."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from small_chat import chat

__all__ = ["chat"]
