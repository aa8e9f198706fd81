"""Where the demo keeps its files, and the sentence for a disk that does not take them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from grain_sft.errors import GrainSftError, StorageError
from grain_sft.storage import files

SPACE_NEEDED = 60  # MB: six checkpoints of 8 MB, and the tokens

_MARKER = ".grain_sft_demo"
_CHECKPOINT = re.compile(r"step-(\d{8})\.npz")
_ADVICE = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        f"Free some space (the demo takes {SPACE_NEEDED} MB), or give a folder on another disk with --dir.",
    ),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "A file is in the way: give another folder with --dir."),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "Give a folder that you are allowed to write to with --dir."
    ),
}


@dataclasses.dataclass(frozen=True)
class DemoFolder:
    """Paths below `root`, an absolute path. What is below `corpus` and `runs` belongs to the demo and may be removed."""

    root: Path

    @property
    def corpus(self) -> Path:
        """The folder of tokenizer and tokens, and of what they were made of."""
        return self.root / "corpus"

    @property
    def index(self) -> Path:
        """The index of the corpus."""
        return self.corpus / "index.json"

    @property
    def record(self) -> Path:
        """What the corpus was made with; written last, so a corpus that has one is complete."""
        return self.corpus / "record.json"

    @property
    def config(self) -> Path:
        """The config that `grain_sft.load` takes."""
        return self.root / "config.json"

    @property
    def runs(self) -> Path:
        """The folder of the runs' logs and checkpoints, made anew by every demo."""
        return self.root / "runs"


@contextlib.contextmanager
def claim(where: str | os.PathLike[str]) -> Iterator[DemoFolder]:
    """Make the folder `where`, or use an earlier demo's, and keep other demos out of it.

    Raises:
      StorageError: it cannot be made, is in use by another demo, or holds files that are not a demo's.
    """
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
            with files.atomic_write(marker) as file:
                file.write("A folder of `grain-sft demo`, which writes it anew when it runs again.\n")
        lock = os.open(marker, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"{root}: another demo is running in this folder. Wait for it, or give another folder with --dir."
            ) from error
        except OSError:  # a network file system without locks
            pass
        yield DemoFolder(root)
    finally:
        os.close(lock)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` about `path` into a `StorageError` that names what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, GrainSftError) and not isinstance(error, StorageError):
            raise
        cause = error.__cause__ if isinstance(error, StorageError) else error
        code = cause.errno if isinstance(cause, OSError) else None
        text = str(error) if isinstance(error, StorageError) else f"{path}: can't be written ({error.strerror})."
        advice = _ADVICE.get(code or 0)
        raise StorageError(f"{text} {advice}" if advice else text) from error


def remove(folder: Path) -> None:
    """Remove `folder` with all that is in it, if it exists."""
    with writing(folder), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def newest_step(checkpoints: Path) -> int:
    """Return the step of the newest checkpoint in a folder.

    Raises:
      StorageError: it holds none.
    """
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    steps = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    if not steps:
        raise StorageError(f"{checkpoints}: holds no checkpoint. Give more --steps.")
    return max(steps)
