"""Outputs of commands."""

from __future__ import annotations

from grain_sft.storage import files


def check_output(path: str | None, *, folder: bool = False) -> None:
    """Refuse an output that can't be written, before the work that fills it.

    Args:
      path: what `--output` names; None where nothing is written.
      folder: whether a folder is written, not a file.

    Raises:
      StorageError: it can't be written.
    """
    if path is not None:
        files.check_writable(files.normalize(path), folder=folder)
