"""How much a test tries where more of the same may be asked for."""

import os

_SHARE = float(os.environ.get("GRAIN_SFT_EXAMPLES", "0.25"))


def examples(count: int) -> int:
    """A quarter of `count`, or the share that GRAIN_SFT_EXAMPLES gives."""
    return max(10, round(_SHARE * count))
