"""Files as every part of grain_sft handles them: local or remote, written whole or not at all."""

from __future__ import annotations

import atexit
import contextlib
import glob as local_glob
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from grain_sft.errors import CorpusFileError, GrainSftError, StorageError
from grain_sft.storage import remote_bodies, remote_files, temporary
from grain_sft.storage.regular_files import read_regular

CACHE_DIR_VARIABLE = "GRAIN_SFT_CACHE_DIR"

filesystem = remote_files.filesystem

_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")


def is_remote(path: str) -> bool:
    """Whether `path` is a URL of a remote file system (`gs://...`); `file://` and plain paths are local."""
    match = _URL.match(path)
    return match is not None and match.group(1) != "file"


def normalize(path: str | os.PathLike[str]) -> str:
    """`path` as a string: URLs unchanged, `file://` stripped, `~` expanded."""
    text = os.fspath(path)
    if text.startswith("file://"):
        text = text[len("file://") :]
    return text if is_remote(text) else os.path.expanduser(text)


def absolute(path: str) -> str:
    """A local path from the root on; a URL as it is."""
    return path if is_remote(path) else os.path.abspath(path)


@contextlib.contextmanager
def remote(path: str) -> Iterator[Any]:
    """The file system of the URL `path`; whatever its client raises meanwhile becomes a sentence.

    Raises:
      CorpusFileError: no such file, no credentials, no network.
    """
    try:
        yield filesystem(path)
    except GrainSftError:
        raise
    except Exception as error:  # clients raise their own kinds, such as gcsfs.retry.HttpError
        raise remote_files.failure(path, error) from error


def read_bytes(path: str, *, version: str | None = None) -> bytes:
    """The whole of a small file, local or remote; `version` as in `read_range`."""
    if is_remote(path):
        with remote(path):
            return remote_files.read(path, version=version)
    try:
        return read_regular(path)
    except GrainSftError:
        raise
    except FileNotFoundError as error:
        raise CorpusFileError(f"{path}: no such file.") from error
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise CorpusFileError(f"{path}: can't be read ({error}).") from error


def read_range(path: str, start: int, stop: int, *, version: str | None = None) -> bytes:
    """Bytes `start` to `stop` of a file, local or remote; fewer at its end.

    Args:
      version: version of a remote file, as `size_and_version` returns it. Another version is an error.
    """
    if stop <= start:
        return b""
    if is_remote(path):
        with remote(path):
            return remote_files.read(path, start, stop, version=version)
    try:
        return read_regular(path, start, stop)
    except GrainSftError:
        raise
    except (OSError, ValueError) as error:
        raise CorpusFileError(f"{path}: can't be read at byte {start} ({error}).") from error


def size(path: str) -> int:
    """Bytes of a file, local or remote."""
    return size_and_version(path)[0]


def size_and_version(path: str) -> tuple[int, str | None]:
    """Bytes of a file, local or remote, and the version of a remote one, where its file system tells versions apart."""
    if is_remote(path):
        with remote(path) as client:
            info = client.info(path)
            return remote_files.size_of(path, info), remote_bodies.version_of(info)
    try:
        return os.stat(path).st_size, None
    except FileNotFoundError as error:
        raise CorpusFileError(f"{path}: no such file.") from error
    except (OSError, ValueError) as error:
        raise CorpusFileError(f"{path}: can't be read ({error}).") from error


def exists(path: str) -> bool:
    """Whether there is such a file or folder, local or remote."""
    if is_remote(path):
        return _remote_kind(path) is not None
    return os.path.lexists(path)


def is_file(path: str) -> bool:
    """Whether there is such a file, local or remote.

    Raises:
      CorpusFileError: its file system can't say.
    """
    return _remote_kind(path) == "file" if is_remote(path) else os.path.isfile(path)


def _remote_kind(path: str) -> str | None:
    """ "file" or "directory"; None where there is neither. fsspec's own `exists` takes any failure for absence."""
    with remote(path) as client:
        try:
            return str(client.info(path)["type"])
        except FileNotFoundError:
            return None


def glob(pattern: str) -> list[str]:
    """The local or remote files that match, sorted."""
    if is_remote(pattern):
        with remote(pattern) as client:
            return sorted(str(client.unstrip_protocol(match)) for match in client.glob(pattern))
    return sorted(local_glob.glob(pattern, recursive=True))


def join(folder: str, *names: str) -> str:
    """A path below `folder`, which may be a URL."""
    return "/".join([folder.rstrip("/"), *names]) if is_remote(folder) else os.path.join(folder, *names)


def parent(path: str) -> str:
    """The folder that a local or remote path is in; a local one from the root on."""
    return path.rstrip("/").rsplit("/", 1)[0] if is_remote(path) else os.path.dirname(os.path.abspath(path))


def name_of(path: str) -> str:
    """The last part of a local or remote path."""
    return path.rstrip("/").rsplit("/", 1)[-1] if is_remote(path) else os.path.basename(os.path.abspath(path))


def folders_around(shard: str) -> Iterator[str]:
    """The folders in which what belongs to a shard's corpus may stand: the shard's own, that of the split, that of the
    corpus."""
    folder = shard
    for _ in range(3):
        folder = parent(folder)
        if is_remote(folder) != is_remote(shard):  # nothing is above a bucket
            return
        yield folder


def beside(shard: str, name: str) -> str | None:
    """The file or folder `name` that belongs to a shard's corpus: the first in `folders_around`.

    Raises:
      CorpusFileError: a remote file system can't say.
    """
    return next((path for folder in folders_around(shard) if exists(path := join(folder, name))), None)


def write_bytes(path: str, data: bytes) -> None:
    """Write a file whole, local or remote: it appears under its name complete, or not at all."""
    with atomic_write(path, "wb") as file:
        file.write(data)


def read_text(path: str) -> str:
    """The whole of a small UTF-8 text file, local or remote."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusFileError(
            f"{path}: byte {error.start} is not UTF-8, so this is not a text file (mix, index or config). "
            "A file of tokens is given as a .npy path, a glob or a list."
        ) from error


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that appears under `path` whole, synced to disk, or not at all. What killed processes left in its folder
    is removed.

    A remote file is written to a temporary local one, and sent when that is complete.

    Raises:
      StorageError: the folder can't be written to, or the disk is full. Nothing is left behind.
    """
    if is_remote(os.fspath(path)):
        with _spooled(os.fspath(path), mode) as spool:
            yield spool
        return
    target = Path(path)
    encoding = None if "b" in mode else "utf-8"
    made, lock = "", None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made, fd, lock = temporary.create(target)
        _unfinished.add(made)
        with os.fdopen(fd, mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, target)
        with contextlib.suppress(OSError):  # some network file systems can't; the file itself is synced
            sync_folder(target.parent)
    except GrainSftError:  # of the caller's own making; some are OSErrors
        raise
    except OSError as error:
        raise StorageError(f"{target}: can't be written ({error.strerror or error}).") from error
    finally:
        with contextlib.suppress(OSError):
            if made:
                os.unlink(made)
        _unfinished.discard(made)
        if lock is not None:
            lock.release()


_unfinished: set[str] = set()
"""Temporary files of `atomic_write`, for a process that ends in the middle of it (Ctrl-C in native code)."""


@atexit.register
def _remove_unfinished() -> None:
    for path in _unfinished.copy():
        with contextlib.suppress(OSError):
            os.unlink(path)


os.register_at_fork(after_in_child=_unfinished.clear)


def check_writable(path: str, *, folder: bool = False) -> None:
    """Refuse a path that can't be written, before long work whose result goes there. Nothing is left behind.

    Args:
      path: Local path or URL.
      folder: Whether `path` is a folder of results, not a file.

    Raises:
      StorageError: It can't be written: the message names the folder and the reason.
    """
    if is_remote(path):
        probe = f"{path.rstrip('/')}.grain_sft-probe"
        write_bytes(probe, b"")
        with contextlib.suppress(GrainSftError), remote(probe) as client:  # a role may create and not delete
            client.rm([probe])
        return
    if not folder and os.path.isdir(path):
        raise StorageError(f"{path}: is a folder; expected the name of a file. Give a file in it.")
    place = os.path.abspath(path if folder else os.path.dirname(os.path.abspath(path)))
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = error.strerror if os.path.isdir(place) else "it is not a folder"
        raise StorageError(f"{path}: can't be written: {place}: {reason}. Give an output in another folder.") from error


@contextlib.contextmanager
def _spooled(path: str, mode: str) -> Iterator[IO[Any]]:
    """A temporary local file whose content becomes the remote file `path`."""
    encoding = None if "b" in mode else "utf-8"
    try:
        with tempfile.NamedTemporaryFile(mode, encoding=encoding, prefix="grain_sft-") as file:
            yield file
            file.flush()
            _send(file.name, path)
    except GrainSftError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: can't be written ({error.strerror or error}).") from error


def _send(local: str, path: str) -> None:
    try:
        filesystem(path).put_file(local, path)
    except GrainSftError:
        raise
    except Exception as error:  # clients raise their own kinds
        raise StorageError(f"{path}: can't be written ({type(error).__name__}: {error}).") from error


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of a file in the making, so that one process of a machine makes it; freed by the kernel however
    this process ends.

    Raises:
      StorageError: its folder can't be written to, or has no locks.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(
            f"{target.parent}: {target.name} can't be kept there ({error.strerror}). "
            f"Point ${CACHE_DIR_VARIABLE} to a folder on a local disk that can be written to."
        ) from error
    try:
        lock = temporary.HeldLock(fd)
    except OSError as error:
        raise StorageError(
            f"{target.parent}: is on a file system without locks ({error.strerror}), which keep many processes from "
            f"making the same file. Point ${CACHE_DIR_VARIABLE} to a folder on a local disk."
        ) from error
    try:
        yield
    finally:
        lock.release()


def cache_dir() -> Path:
    """Where orders and other derived data of this machine are kept: $GRAIN_SFT_CACHE_DIR where it is a local folder, or
    the user's cache."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen and not is_remote(chosen):
        return Path(normalize(chosen))
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "grain_sft"


def cache_url() -> str | None:
    """The folder in a bucket that machines share derived data by: $GRAIN_SFT_CACHE_DIR where it is a URL."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    return chosen if chosen and is_remote(chosen) else None


def upload(local: str | os.PathLike[str], url: str) -> None:
    """Copy a local file to a remote one, which appears whole or not at all.

    Raises:
      StorageError: it can't be written.
    """
    _send(os.fspath(local), url)


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` reach the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
