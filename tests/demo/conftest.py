"""The tests of the demo run on the CPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
