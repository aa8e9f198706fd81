"""Read access restricted to regular local files: opening a FIFO can block, and reading a device may never end."""

import contextlib
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar

from grain_sft.errors import CorpusError, CorpusFileError

_root: ContextVar[tuple[tuple[str, ...], str] | None] = ContextVar("grain_sft_root", default=None)
"""Folders, one of which must contain every opened file, and the one path that may lie outside."""

_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
_KINDS |= dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK), "a device")


@contextlib.contextmanager
def inside(root: str | None, but: str = "") -> Iterator[None]:
    """Make `open_regular` refuse files outside of the folder `root`, in this thread, until the context ends.

    Args:
      root: Real path of the folder, with a slash at its end; None keeps the outer context's folder.
      but: Path that the user gave, which may lie outside of `root`.
    """
    token = _root.set(_root.get() if root is None else ((root,), but))
    try:
        yield
    finally:
        _root.reset(token)


@contextlib.contextmanager
def inside_also(folder: str) -> Iterator[None]:
    """Make `open_regular` also accept files in `folder`, a root as in `inside`, for files that this package itself names."""
    bound = _root.get()
    token = _root.set(bound and ((*bound[0], folder), bound[1]))
    try:
        yield
    finally:
        _root.reset(token)


def outside(path: str, real: str, root: str) -> CorpusError:
    """Return the error for `path`, whose real path `real` lies outside of the folder `root`."""
    at = "" if real == path else f" (it is {real})"
    return CorpusError(
        f"{path}: lies outside of {root}{at}, which was given as the root of all files. Fix the mix, the index or the "
        "link that leads there, or give a root that holds it."
    )


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a read-only file descriptor of the regular file `path`. The caller closes it.

    Raises:
      OSError: The file is missing or can't be opened.
      CorpusFileError: `path` is not a regular file.
      CorpusError: The file is outside of the folder that `inside` sets.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if os.path.exists(path):
            _check_mode(path, os.stat(path).st_mode)
        if not isinstance(error, BlockingIOError):
            raise
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # waits for another program to release its lease of the file
    try:
        _check_mode(path, os.fstat(fd).st_mode)
        bound = _root.get()
        if bound is not None and os.fspath(path) != bound[1]:  # a link in the path may have changed since its check
            real = os.readlink(f"/proc/self/fd/{fd}") if os.path.exists("/proc/self/fd") else os.path.realpath(path)
            if not real.startswith(bound[0]):
                raise outside(os.fspath(path), real, bound[0][0])
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], start: int = 0, stop: int | None = None) -> bytes:
    """Return the bytes [start, stop) of the regular file `path`, or fewer at its end. None for `stop` reads to the end."""
    fd = open_regular(path)
    try:
        return pread(fd, max(0, (os.fstat(fd).st_size if stop is None else stop) - start), start)
    finally:
        os.close(fd)


def pread(fd: int, count: int, offset: int) -> bytes:
    """Return `count` bytes of an open file from `offset` on, fewer only at its end. `os.pread` may return fewer anywhere."""
    parts: list[bytes] = []
    while count and (data := os.pread(fd, count, offset)):
        parts.append(data)
        count, offset = count - len(data), offset + len(data)
    return b"".join(parts)


def _check_mode(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
        raise CorpusFileError(
            f"{os.fspath(path)}: can't be read, since it is {kind}; expected a regular file. Give the path of one."
        )
