"""The demo's folder, and the sentence for a disk that it can't be written to."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from grain_sft.errors import GrainSftError, StorageError
from grain_sft.storage import exclusive, files

_MARKER = ".grain_sft_demo"
_CHECKPOINT = re.compile(r"step-(\d{8})\.npz")
_ADVICE = {
    "Free some space (the demo takes 60 MB: six checkpoints, and the tokens), or give a folder on another disk with --dir.": (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    ),
    "A file is in the way: give another folder with --dir.": (errno.EEXIST, errno.ENOTDIR),
    "Give a folder that you are allowed to write to with --dir.": (errno.EACCES, errno.EPERM, errno.EROFS),
}


class DemoFolder:
    """Paths below `root`, an absolute path. What is below `corpus` and `runs` belongs to the demo and may be removed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.corpus = root / "corpus"  # tokenizer and tokens, and what they were made of
        self.index = self.corpus / "index.json"
        self.record = self.corpus / "record.json"  # what the corpus was made with; written last, when it is complete
        self.config = root / "config.json"  # for `grain_sft.load`
        self.runs = root / "runs"  # logs and checkpoints, made anew by every demo


@contextlib.contextmanager
def claim(where: str | os.PathLike[str]) -> Iterator[DemoFolder]:
    """Make the folder `where`, or use an earlier demo's, and keep other demos out of it."""
    if files.is_remote(os.fspath(where)):
        raise StorageError(f"{where}: not a local folder. The demo trains on this machine: give one with --dir.")
    root = Path(os.path.abspath(files.normalize(where)))
    marker = root / _MARKER
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            others = [entry.name for entry in root.iterdir() if not entry.name.startswith(f".{_MARKER}")]
            if others:
                raise StorageError(
                    f"{root}: holds {sorted(others)[0]!r}, but no earlier demo. "
                    "Give an empty folder, or one that does not exist yet, with --dir."
                )
            files.write_bytes(str(marker), b"A folder of `grain-sft demo`, which writes it anew when it runs again.\n")
        in_use = f"{root}: another demo is running in this folder. Wait for it, or give another folder with --dir."
        with exclusive(os.open(marker, os.O_RDONLY | os.O_CLOEXEC), in_use):
            yield DemoFolder(root)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` about a file below `path` into a `StorageError` that names what to do."""
    try:
        yield
    except OSError as error:
        is_ours = isinstance(error, StorageError)
        if isinstance(error, BrokenPipeError | GrainSftError) and not is_ours:
            raise
        text = str(error) if is_ours else f"{error.filename or path}: can't be written ({error.strerror})."
        code = getattr(error.__cause__ if is_ours else error, "errno", None)
        advice = [text for text, codes in _ADVICE.items() if code in codes]
        raise StorageError(" ".join([text, *advice])) from error


def remove(folder: Path) -> None:
    """Remove `folder` with all that is in it, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest checkpoint in a folder."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    steps = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    if not steps:
        raise StorageError(f"{checkpoints}: holds no checkpoint. Give more --steps.")
    return max(steps)
