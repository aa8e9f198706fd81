"""Target: the output folder of a corpus, and the folder of unfinished work that becomes it."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grain_sft.errors import PrepareError, StorageError
from grain_sft.prepare.records.strict_json import check_name
from grain_sft.prepare.request import differences
from grain_sft.storage import files

MANIFEST = "prepare.json"
"""Name of the file that is written last: a folder with one is a finished corpus."""


class Target:
    """An output folder, and the folder of unfinished work next to it.

    A local output appears whole, by one rename. In a bucket its files appear one by one, the manifest last.

    Args:
      output: Folder of the corpus; local, or a URL.

    Raises:
      PrepareError: The output is the root of a file system or a bucket, or has no name.
    """

    def __init__(self, output: str | os.PathLike[str]) -> None:
        check_name("output", os.fspath(output))
        self.output = files.absolute(files.normalize(output)).rstrip("/")
        self.remote = files.is_remote(self.output)
        if not self.output:
            raise PrepareError("output /: is the root of the file system. Give a folder in it.")
        self.rejected = f"{self.output}.rejected.jsonl"
        if not self.remote and os.path.islink(self.output):
            self.output = os.path.realpath(self.output)  # so that a link to a folder stays one
        if self.remote and "/" not in self.output.split("://", 1)[1]:
            raise PrepareError(f"{self.output}: is a bucket. Give a folder in it, such as {self.output}/corpus.")
        parent, name = self.output.rsplit("/", 1)
        self.work = f"{parent}/.{name}.grain_sft-work"
        self.chunks = files.join(self.work, "chunks")
        self.stage = self.output if self.remote else files.join(self.work, "corpus")

    @property
    def state(self) -> str:
        """Path of the identity of the unfinished work."""
        return files.join(self.work, "identity.json")

    def check_writable(self) -> None:
        """Refuse an output that can't be written, before the work; a finished corpus may be read-only."""
        if not files.exists(files.join(self.output, MANIFEST)):
            files.check_writable(self.output, folder=True)

    def finished(self, identity: Mapping[str, Any], *, overwrite: bool) -> dict[str, Any] | None:
        """Return the manifest of the finished corpus, if `identity` describes it.

        Raises:
          PrepareError: The output is another corpus, or something else, and is not to be overwritten.
        """
        manifest = files.join(self.output, MANIFEST)
        if files.exists(manifest):
            found = _load(manifest)
            if found.get("key") == identity["key"]:
                return found
            if not overwrite:
                raise PrepareError(_changed(self.output, "a corpus made from", found, identity))
        elif self.remote:
            if not files.exists(self.state) and _remote_files(self.output):
                raise PrepareError(
                    f"{self.output}: is not empty, and holds no {MANIFEST}, so it was not made here. "
                    "Give a folder that is empty or does not exist yet, or remove its files yourself."
                )
        elif os.path.lexists(self.output):
            if not os.path.isdir(self.output):
                raise PrepareError(f"{self.output}: is not a folder. Give another output.")
            if os.listdir(self.output) and overwrite:
                raise PrepareError(f"{self.output}: holds no {MANIFEST}, so it is not overwritten. Remove it yourself.")
            if os.listdir(self.output):
                raise PrepareError(
                    f"{self.output}: is not empty, and holds no {MANIFEST}, so it was not made here. "
                    "Give a folder that is empty or does not exist yet."
                )
        return None

    @contextlib.contextmanager
    def claim(self, identity: Mapping[str, Any], *, overwrite: bool) -> Iterator[None]:
        """Make the folder of unfinished work or continue it, and keep other processes out of it."""
        with self.locked():
            if self.holds_other(identity, overwrite=overwrite):
                self.clear()
            self.mark(identity)
            self.remove_temporary()
            yield

    def holds_other(self, identity: Mapping[str, Any], *, overwrite: bool) -> bool:
        """Return whether files of another preparation have to be cleared; refuse, unless they are to be overwritten."""
        if files.exists(self.state):
            found = _load(self.state)
            if found.get("key") != identity["key"]:
                if not overwrite:
                    raise PrepareError(_changed(self.output, "unfinished work from", found, identity))
                return True
        # a local corpus is replaced when the new one is complete; in a bucket the new one's files go to the same names
        return self.remote and files.exists(files.join(self.output, MANIFEST))

    def mark(self, identity: Mapping[str, Any]) -> None:
        """Write the identity of the unfinished work."""
        if not files.exists(self.state):
            files.write_bytes(self.state, json.dumps(identity, indent=2).encode())

    def clear(self) -> None:
        """Remove unfinished work, and all files of a remote output, its manifest first."""
        if self.remote:
            # a run that is stopped half-way leaves unfinished work without a key, not a folder that looks new
            files.write_bytes(self.state, json.dumps({"key": None}).encode())
            manifest = files.join(self.output, MANIFEST)
            if files.exists(manifest):
                _remove_remote(manifest, [manifest])
            _remove_remote(self.output, _remote_files(self.output))
        self._clear()

    def publish(self) -> None:
        """Rename the staged corpus to the output, and remove the rest."""
        if not self.remote:
            old = files.join(self.work, "replaced")
            try:
                if os.path.isdir(self.output) and os.listdir(self.output):
                    shutil.rmtree(old, ignore_errors=True)
                    os.rename(self.output, old)
                os.rename(self.stage, self.output)
                files.sync_folder(Path(self.output).parent)
            except OSError as error:
                raise StorageError(f"{self.output}: can't be made ({error.strerror}).") from error
        self.discard()

    def discard(self) -> None:
        """Remove the unfinished work, its state last."""
        self._clear()
        if self.remote:
            return
        with contextlib.suppress(OSError):
            shutil.rmtree(self.work)

    def _clear(self) -> None:
        if self.remote:
            found = _remote_files(self.work)
            state = [path for path in found if path.endswith(self.state.split("://", 1)[1])]
            _remove_remote(self.work, [path for path in found if path not in state])
            _remove_remote(self.work, state)
            return
        for path in (self.chunks, files.join(self.work, "corpus"), files.join(self.work, "replaced")):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.state)

    def forget(self, name: str) -> None:
        """Remove the folder `name` of the unfinished work; all of the work, where it has no identity."""
        if not files.exists(self.state):
            self.discard()
        elif self.remote:
            folder = files.join(self.work, name)
            _remove_remote(folder, _remote_files(folder))
        else:
            shutil.rmtree(files.join(self.work, name), ignore_errors=True)

    def remove_temporary(self) -> None:
        """Remove files that a killed run was writing."""
        if self.remote:
            return
        found = [os.path.join(folder, name) for folder, _, names in os.walk(self.work) for name in names]
        parent, name = os.path.split(self.rejected)
        found += glob.glob(os.path.join(glob.escape(parent), f".{glob.escape(name)}.*.tmp"))
        for path in found:
            if os.path.basename(path).startswith(".") and path.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    os.unlink(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder of unfinished work, and keep other processes of this machine out of it."""
        if self.remote:
            yield  # buckets have no locks
            return
        try:
            os.makedirs(self.work, exist_ok=True)
            lock = os.open(files.join(self.work, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(
                f"{self.work}: can't be made ({error.strerror}). Give an output in a folder that can be written to."
            ) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StorageError(f"{self.output}: is being prepared by another process. Wait for it.") from error
            except OSError:  # a network file system without locks
                pass
            yield
        finally:
            os.close(lock)


def _remote_files(folder: str) -> list[str]:
    """Return all files below a folder in a bucket."""
    with files.remote(folder) as client:
        return [str(path) for path in client.find(folder.rstrip("/") + "/")]


def _remove_remote(where: str, paths: Sequence[str]) -> None:
    with files.remote(where) as client:
        if paths:
            client.rm(list(paths))


def _load(path: str) -> dict[str, Any]:
    try:
        found = json.loads(files.read_text(path))
        if not isinstance(found, dict):
            raise TypeError("not an object")
        return found
    except (ValueError, TypeError) as error:
        raise PrepareError(f"{path}: damaged ({error}). Remove it, and prepare again.") from error


def _changed(output: str, what: str, found: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    changed = differences(_compared(found), _compared(identity)) or ["its key"]
    listed = "\n  ".join(changed[:20])
    return (
        f"{output}: holds {what} other inputs or options. What changed:\n  {listed}\n"
        "Give another output, the old inputs and options, or --overwrite to begin again."
    )


def _compared(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an identity that are compared, inputs by their paths."""
    inputs = identity.get("inputs") or []
    paths = [str(entry.get("path")) for entry in inputs]
    by_path = dict(zip(paths, inputs, strict=True)) if len(set(paths)) == len(paths) else inputs
    return {"request": identity.get("request"), "inputs": by_path, "tokenizer": identity.get("tokenizer")}
