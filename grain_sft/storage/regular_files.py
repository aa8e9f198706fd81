"""Read access to regular local files. The context `inside` limits the access to one folder.

Files that are not regular are always refused: opening a FIFO can block, and reading a device may never end.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from grain_sft.errors import CorpusError, CorpusFileError

_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


class _Allowed(NamedTuple):
    """Files that may be opened: the files in `folders` (real paths that end with a slash), and the file `other_path`."""

    folders: tuple[str, ...]
    other_path: str


_allowed: ContextVar[_Allowed | None] = ContextVar("grain_sft_allowed", default=None)  # None allows all files


@contextlib.contextmanager
def _allowing(allowed: _Allowed | None) -> Iterator[None]:
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def inside(root: str | None, but: str = "") -> contextlib.AbstractContextManager[None]:
    """Make `open_regular` refuse files outside of the folder `root`, in this thread, until the context ends.

    Args:
      root: Real path of the folder, with a slash at its end; None changes nothing.
      but: Path of a file that the user gave. This file is allowed even outside of `root`.
    """
    return _allowing(_allowed.get() if root is None else _Allowed((root,), but))


def inside_also(folder: str) -> contextlib.AbstractContextManager[None]:
    """Within `inside`, make `open_regular` also accept files in `folder`, a real path with a slash at its end."""
    allowed = _allowed.get()
    if allowed is not None:
        allowed = allowed._replace(folders=(*allowed.folders, folder))
    return _allowing(allowed)


def outside(path: str, real: str, root: str) -> CorpusError:
    """Return the error for `path`, whose real path `real` lies outside of the folder `root`."""
    target = "" if real == path else f"; its real path is {real}"
    problem = f"{path}: lies outside of {root}, which was given as the root of all files{target}"
    fix = "Fix the mix, the index or the link that leads there, or give a root that contains the file"
    return CorpusError(f"{problem}. {fix}.")


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a read-only file descriptor of the regular file `path`. The caller closes it.

    Raises:
      OSError: The file is missing or can't be opened.
      CorpusFileError: `path` is not a regular file.
      CorpusError: The file is outside of the folders that `inside` and `inside_also` allow.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # otherwise, opening a FIFO waits for a writer
    except OSError as error:
        if os.path.exists(path):  # perhaps a socket: the error of `os.open` does not say so
            _check_is_regular(path, os.stat(path).st_mode)
        if not isinstance(error, BlockingIOError):
            raise
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # waits for another program to release its lease of the file
    try:
        _check_is_regular(path, os.fstat(fd).st_mode)
        _check_is_allowed(os.fspath(path), fd)
        os.set_blocking(fd, True)  # undo O_NONBLOCK
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], start: int = 0, stop: int | None = None) -> bytes:
    """Return the bytes [start, stop) of the regular file `path`, fewer at its end. Without `stop`, read to the end."""
    with open(open_regular(path), "rb") as file:
        file.seek(start)
        return file.read(-1 if stop is None else max(0, stop - start))


def pread(fd: int, count: int, offset: int) -> bytes:
    """Return `count` bytes of an open file from `offset` on, fewer only at its end."""
    parts: list[bytes] = []
    while count and (data := os.pread(fd, count, offset)):
        parts.append(data)
        count -= len(data)
        offset += len(data)
    return b"".join(parts)


def _check_is_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
        problem = f"{os.fspath(path)}: can't be read, since it is {kind}; expected a regular file"
        raise CorpusFileError(f"{problem}. Give the path of a file.")


def _check_is_allowed(path: str, fd: int) -> None:
    """Raise a CorpusError if the open file `fd`, opened as `path`, is not in an allowed folder."""
    allowed = _allowed.get()
    if allowed is None or path == allowed.other_path:
        return
    # ask the system for the path of the open file: by now, `path` may lead to another file
    real = os.readlink(f"/proc/self/fd/{fd}") if os.path.exists("/proc/self/fd") else os.path.realpath(path)
    if not real.startswith(allowed.folders):
        raise outside(path, real, allowed.folders[0])
