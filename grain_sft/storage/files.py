"""Functions that read, write and find files. Every path may be local or a URL.

A failed read raises a CorpusFileError, and a failed write raises a StorageError.
"""

import contextlib
import glob as local_glob
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from grain_sft.arguments import check_type
from grain_sft.errors import CorpusFileError, GrainSftError, StorageError, WrongTypeError
from grain_sft.storage import atomic_file
from grain_sft.storage.atomic_file import sync_folder as sync_folder
from grain_sft.storage.locks import CACHE_DIR_VARIABLE as CACHE_DIR_VARIABLE
from grain_sft.storage.locks import locked as locked
from grain_sft.storage.regular_files import read_regular
from grain_sft.storage.remote import files as remote_files
from grain_sft.storage.remote.clients import filesystem as filesystem

_URL = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+://")


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL of a remote file system (`gs://...`); `file://` and plain paths are local."""
    return _URL.match(path) is not None


def normalize(path: str | os.PathLike[str]) -> str:
    """Return `path` as text: URLs unchanged, `file://` stripped, `~` expanded. Refuse gs:/ or s3:/, which pathlib makes."""
    check_type("path", path, str | os.PathLike, "a path")
    text = os.fspath(path).removeprefix("file://")
    if re.match("(gs|gcs|s3|https?):/(?!/)", text):
        raise WrongTypeError(f"{text}: expected two slashes, which `pathlib.Path` makes one. Give the URL as text.")
    return text if is_remote(text) else os.path.expanduser(text)


def absolute(path: str) -> str:
    """Return the absolute form of a local path; return a URL unchanged."""
    return path if is_remote(path) else os.path.abspath(path)


@contextlib.contextmanager
def reading(path: str, part: str = "") -> Iterator[None]:
    """Turn an exception in this context into a CorpusFileError about `path`. Exceptions of grain_sft stay as they are.

    `part` names the bytes that are read, such as "bytes 0 to 9 ".
    """
    try:
        yield
    except GrainSftError:
        raise
    except Exception as error:  # clients raise their own kinds of exceptions, such as gcsfs.retry.HttpError
        raise remote_files.failure(path, error, part) from error


@contextlib.contextmanager
def remote(path: str) -> Iterator[Any]:
    """Yield the fsspec file system of the URL `path`. Exceptions become CorpusFileErrors, as in `reading`."""
    with reading(path):
        yield filesystem(path)


def read_bytes(path: str, *, version: str | None = None) -> bytes:
    """Return all bytes of a small file. For `version`, see `read_range`."""
    with reading(path):
        return remote_files.read(path, version=version) if is_remote(path) else read_regular(path)


def read_text(path: str) -> str:
    """Return the text of a small UTF-8 file."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{path}: byte {error.start} is not UTF-8, so this is not a text file (mix, index or config)"
        raise CorpusFileError(f"{problem}. Give token files as a .npy path, a glob or a list.") from error


def read_range(path: str, start: int, stop: int, *, version: str | None = None) -> bytes:
    """Return the bytes [start, stop) of a file, fewer at its end.

    `version` is a result of `size_and_version`. If a remote file now has another version, raise a CorpusFileError.
    """
    if stop <= start:
        return b""
    with reading(path, f"bytes {start} to {stop} "):
        if is_remote(path):
            return remote_files.read(path, start, stop, version=version)
        return read_regular(path, start, stop)


def size(path: str) -> int:
    """Return the size of a file in bytes."""
    return size_and_version(path)[0]


def size_and_version(path: str) -> tuple[int, str | None]:
    """Return the size of a file in bytes, and its version. Local files, and stores without versions, have the version None."""
    with reading(path):
        return remote_files.size_and_version(path) if is_remote(path) else (os.stat(path).st_size, None)


def exists(path: str) -> bool:
    """Return whether a file or folder exists. True for a local link with a missing target."""
    return _remote_kind(path) is not None if is_remote(path) else os.path.lexists(path)


def is_file(path: str) -> bool:
    """Return whether a file exists."""
    return _remote_kind(path) == "file" if is_remote(path) else os.path.isfile(path)


def is_folder(path: str) -> bool:
    """Return whether a folder exists."""
    return _remote_kind(path) == "directory" if is_remote(path) else os.path.isdir(path)


def _remote_kind(path: str) -> str | None:
    """Return "file", "directory", or None if neither exists. Unlike fsspec's `exists`, raise an error if a request fails."""
    try:
        return str(remote_files.infos([path])[0]["type"])
    except CorpusFileError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def glob(pattern: str) -> list[str]:
    """Return the paths of the files and folders that match `pattern`, sorted.

    Raises:
      CorpusFileError: A local folder that the pattern searches can't be listed, or `**` reaches one local folder by two paths.
    """
    if is_remote(pattern):
        with remote(pattern) as client:
            found = map(str, map(client.unstrip_protocol, client.glob(pattern)))
            return sorted(path for path in found if path.count("/.") == pattern.count("/."))  # `*` matches no hidden name
    # `glob` silently skips folders that can't be listed. So for a/*/b/*.npy, first list the folders a/*/b, then a/*, then a.
    folders = pattern
    while local_glob.has_magic(folders):
        folders = os.path.dirname(folders)
        for folder in local_glob.iglob(os.path.join(folders, ""), recursive=True):  # the "/" at the end leaves out files
            try:
                os.scandir(folder).close()
            except OSError as error:
                refuse_unlisted(error)
    paths = sorted(local_glob.glob(pattern, recursive=True))
    if "**" in pattern:
        check_distinct(sorted(set(map(os.path.dirname, paths))))
    return paths


def refuse_unlisted(error: OSError) -> None:
    """Raise a CorpusFileError for a folder that can't be listed, except lost+found. Its files would be missing unnoticed."""
    if os.path.basename(error.filename.rstrip("/")) != "lost+found":
        raise remote_files.failure(error.filename, error) from error


def check_distinct(folders: Iterable[str]) -> None:
    """Raise a CorpusFileError if two of these local paths lead to the same folder."""
    by_real_path: dict[str, str] = {}
    for folder in folders:
        same = by_real_path.setdefault(os.path.realpath(folder), folder)
        if same != folder:
            problem = f"{folder}: is the same folder as {same}, so its files would be read twice"
            raise CorpusFileError(f"{problem}. Remove the link, or name the files.")


def join(folder: str, *names: str) -> str:
    """Return the path of `names` below `folder`, a local path or a URL."""
    return "/".join([folder.rstrip("/"), *names]) if is_remote(folder) else os.path.join(folder, *names)


def parent(path: str) -> str:
    """Return the folder that contains `path`, as an absolute local path or a URL."""
    return path.rstrip("/").rsplit("/", 1)[0] if is_remote(path) else os.path.dirname(os.path.abspath(path))


def name_of(path: str) -> str:
    """Return the last part of a path."""
    name = path.rstrip("/").rpartition("/")[2]
    # `abspath` takes time for thousands of files. So it is called only for paths such as "a/..", whose last part is not a name.
    return name if name not in ("", ".", "..") or is_remote(path) else os.path.basename(os.path.abspath(path))


def sidecar(shard: str, name: str) -> str | None:
    """Return the path of the file or folder `name` in one of the three folders above a shard, or None if none has it.

    For CORPUS/SPLIT/FOLDER/0.npy, search FOLDER, then SPLIT, then CORPUS.
    """
    folders = parent(shard), parent(parent(shard)), parent(parent(parent(shard)))
    paths = [join(folder, name) for folder in folders if is_remote(folder) == is_remote(shard)]  # gs:/, above gs://b, is local
    return next(filter(exists, paths), None)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a new file. At the end of the context, the complete file appears under `path`, synced to disk or uploaded."""
    name = normalize(path)
    try:
        if is_remote(name):
            with atomic_file.temporary_folder("grain_sft-") as folder:
                local = os.path.join(folder, "file")
                with open(local, mode, encoding=None if "b" in mode else "utf-8") as file:
                    yield file
                upload(local, name)
        else:
            _check_replaceable(name)
            with atomic_file.write_whole(Path(name), mode) as file:
                yield file
    except GrainSftError:  # some are OSErrors
        raise
    except OSError as error:
        fix = "Check the permissions and the free space of its folder"
        raise StorageError(f"{name}: can't be written ({error.strerror or error}). {fix}.") from error


def write_bytes(path: str, data: bytes) -> None:
    """Write a file. It appears only when it is complete."""
    with atomic_write(path, "wb") as file:
        file.write(data)


def upload(local: str | os.PathLike[str], url: str) -> None:
    """Copy a local file to `url`. The remote file appears only when it is complete."""
    try:
        filesystem(url).put_file(os.fspath(local), url)
    except GrainSftError:
        raise
    except Exception as error:
        found = f"{url}: can't be written ({type(error).__name__}: {error})"
        raise StorageError(f"{found}. Check the URL and your permission to write there.") from error


def check_writable(path: str, *, folder: bool = False) -> None:
    """Raise a StorageError if `path` can't be written. `folder` states whether `path` is a folder instead of a file."""
    if is_remote(path):
        probe = f"{path.rstrip('/')}.grain_sft-probe"
        write_bytes(probe, b"")
        with contextlib.suppress(GrainSftError), remote(probe) as client:  # the credentials may not allow deletion
            client.rm_file(probe)  # `rm` would expand the brackets in a name
        return
    if not folder:
        _check_replaceable(path)
    above = os.path.abspath(path) if folder else parent(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        reason = error.strerror if os.path.isdir(above) else "it is not a folder"
        raise StorageError(f"{path}: can't be written: {above}: {reason}. Give an output in another folder.") from error


def real_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local file or folder after links are followed; return a URL unchanged."""
    name = normalize(path)
    return name if is_remote(name) else os.path.realpath(name)


def check_inputs_stay(output: str | os.PathLike[str], inputs: Iterable[str]) -> None:
    """Raise a StorageError if `output` is one of the paths `inputs`, or a folder that contains one of them."""
    replaced = real_path(output).rstrip("/")
    for path in inputs:
        if f"{real_path(path)}/".startswith(f"{replaced}/"):
            raise StorageError(f"{path}: is an input, which the output {output} would replace. Give another output.")


def _check_replaceable(path: str) -> None:
    """Raise a StorageError if `path` is a folder, a device, a link to a pipe, or a link in /dev, such as /dev/stdout."""
    mode = os.stat(path).st_mode if os.path.exists(path) else 0
    is_stream = os.path.islink(path) and (stat.S_ISFIFO(mode) or os.path.abspath(path).startswith("/dev/"))
    if stat.S_ISDIR(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or is_stream:
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise StorageError(f"{path}: can't be written: it is {kind}; expected the name of a file. Give another name.")


def cache_dir() -> Path:
    """Return the local folder for artifacts, such as plans: $GRAIN_SFT_CACHE_DIR if it is local, else the user's cache."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen and not is_remote(chosen):
        return Path(normalize(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grain_sft"


def cache_url() -> str | None:
    """Return the URL of artifacts that machines share: $GRAIN_SFT_CACHE_DIR if it is a URL, else None."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    return chosen if chosen and is_remote(chosen) else None
