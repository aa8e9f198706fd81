"""Environment of the Python processes that this package starts."""

import os
import sys


def child_environment() -> dict[str, str]:
    """Return this process's environment, with a PYTHONPATH by which a child finds the modules that this process finds.

    A notebook, or `python -c`, has the empty path in `sys.path`; for a child it is the working directory.
    """
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
