"""`Target`: the output folder of a corpus, and the folder next to it that holds unfinished work."""

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from grain_sft.errors import GrainSftError, PrepareError, StorageError
from grain_sft.prepare.records.strict_json import check_name
from grain_sft.prepare.request import differences
from grain_sft.storage import exclusive, files, is_at

MANIFEST = "prepare.json"
"""Name of the file that is written last. A folder with this file is a finished corpus."""
LOCK = "lock"
"""Name of the file that a process locks while it prepares."""


class Target:
    """Output folder, and the folder of unfinished work next to it.

    A local output appears whole, by a rename of the folder `stage`. In a bucket, files appear one by one, the manifest last.

    Args:
      output: Folder of the corpus; local, or a URL.

    Attributes:
      output: Absolute path of the folder, or its URL.
      remote: Whether the folder is in a bucket.
      work: Folder of unfinished work, next to the output.
      chunks: Folder of the chunk files, in `work`.
      stage: Folder that the corpus is written to. For a local output, it is a folder in `work`. In a bucket, it is the output.
      state: File in `work` with the identity of the unfinished corpus, as JSON.
      manifest: Path of the finished corpus's manifest.
      rejected: File of rejected records, next to the output (next to the link if the output is a link).
      manifest_name, work_suffix, error: Name of the manifest, end of the name of `work`, and class of the errors.

    Raises:
      PrepareError: The output is the root of a file system, a bucket without a folder, or an empty path.
    """

    manifest_name = MANIFEST
    work_suffix = "work"
    error: type[GrainSftError] = PrepareError

    def __init__(self, output: str | os.PathLike[str]) -> None:
        normalized = files.normalize(output)
        check_name("output", normalized)
        if not os.fspath(output):
            raise self.error("output: is an empty path. Give the folder to write to.")
        path = files.absolute(normalized)
        self.output, self.remote = path.rstrip("/"), files.is_remote(path)
        if not self.output:
            raise self.error("output /: is the root of the file system. Give a folder in it.")
        if self.remote and "/" not in path.split("://", 1)[1].strip("/"):
            raise self.error(f"{path}: expected a folder in a bucket. Give one, such as gs://bucket/corpus.")
        self.rejected = f"{self.output}.rejected.jsonl"
        if not self.remote and os.path.islink(self.output):
            self.output = os.path.realpath(self.output)  # a rename would replace the link, not its folder
        parent, name = self.output.rsplit("/", 1)
        self.work = f"{parent}/.{name}.grain_sft-{self.work_suffix}"
        self.chunks = files.join(self.work, "chunks")
        self.stage = self.output if self.remote else files.join(self.work, "corpus")
        self.state = files.join(self.work, "identity.json")
        self.manifest = files.join(self.output, self.manifest_name)

    def produce(
        self, identity: Mapping[str, Any], make: Callable[[], dict[str, Any]], *, overwrite: bool, wait: bool = False
    ) -> dict[str, Any]:
        """Make the corpus if it is not finished. Return its manifest, with "already": True if this call made nothing.

        Args:
          identity: JSON object of all that decides the corpus. The same "key" means the same corpus.
          make: Function that writes the corpus and returns its manifest.
          overwrite: Whether to replace another corpus, finished or not.
          wait: Whether to wait for another process that makes the same output.
        """
        manifest = self.finished(identity, overwrite=overwrite)
        if manifest is None:
            with self._locked(wait=wait):
                # another process may have made the corpus before this process got the lock
                manifest = self.finished(identity, overwrite=overwrite)
                if manifest is None:
                    self.begin(identity, overwrite=overwrite)
                    manifest = make()
                    self._publish()
                    return manifest
                self.discard()  # the other process removed `work`, but `_locked` made it again
        elif self.remote or os.path.isdir(self.work):
            # remove the work of an interrupted run, unless another process holds the lock and is replacing this corpus
            with contextlib.suppress(StorageError), self._locked(wait=False):
                self.discard()
        return {**manifest, "already": True}

    def check_writable(self) -> None:
        """Raise an error if the output has other files or can't be written. A finished corpus may be read-only."""
        if not files.exists(self.manifest):
            if not self.remote and os.path.ismount(self.output):  # `_publish` could not rename a folder to it
                raise self.error(f"{self.output}: is the root of a file system. Give a folder in it.")
            self.finished({"key": ""}, overwrite=True)  # raises an error if the output has other files
            files.check_writable(self.output, folder=True)
            if not self.remote:  # the output may be writable although its parent, which holds `work`, is not
                files.check_writable(self.work, folder=True)

    def finished(self, identity: Mapping[str, Any], *, overwrite: bool) -> dict[str, Any] | None:
        """Return the manifest if the corpus of `identity` is finished, else None.

        Raise an error if the output is the current folder, or has files that this package did not write. Without `overwrite`,
        also raise an error if the output has another finished corpus.
        """
        if files.exists(self.manifest):
            manifest = read_object(self.manifest)
            if manifest.get("key") == identity["key"]:
                return manifest
            if not overwrite:
                raise self.error(self.changed("a corpus made", manifest, identity))
        else:
            self._refuse_other_files()
        # after the rename of `_publish`, the shell and this process would be in a folder that no longer exists
        if not self.remote and os.path.isdir(self.output) and os.path.samefile(self.output, "."):
            raise self.error(f"{self.output}: is the current folder, which would be replaced. Start in another folder.")
        return None

    def _refuse_other_files(self) -> None:
        """Raise an error if the output has files that this package did not write."""
        if self.remote:  # in a bucket, unfinished work has files in the output, too
            # an empty object `NAME/` is a folder that a user made in the console
            has_files = not files.exists(self.state) and any(path[-1] != "/" for path in _remote_files(self.output))
        elif os.path.lexists(self.output) and not os.path.isdir(self.output):
            raise self.error(f"{self.output}: is not a folder. Give another output.")
        else:
            has_files = os.path.isdir(self.output) and bool(os.listdir(self.output))
        if has_files:
            problem = f"{self.output}: is not empty, and holds no {self.manifest_name}, so it was not made here"
            raise self.error(f"{problem}. Give a folder that is empty or new, or remove its files yourself.")

    def changed(self, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
        """Return an error message that lists how the identity `old` of an earlier run differs from `new`.

        `what` names the work of the earlier run: "a corpus made" or "unfinished work".
        """
        listed = "\n  ".join(list(differences(_compared(old), _compared(new)))[:20] or ["its key"])
        fix = "Give another output, the old inputs and options, or --overwrite to begin again."
        return f"{self.output}: holds {what} from other inputs or options. What changed:\n  {listed}\n{fix}"

    @contextlib.contextmanager
    def _locked(self, *, wait: bool) -> Iterator[None]:
        """Make the work folder, and lock it against other processes of this machine. Buckets have no locks."""
        if self.remote:
            yield
            return
        lock = files.join(self.work, LOCK)
        while True:
            try:
                os.makedirs(self.work, exist_ok=True)
                fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise StorageError(f"{self.work}: can't be made ({error.strerror}). Give another output.") from error
            with exclusive(fd, f"{self.output}: is being prepared by another process. Wait for it.", wait=wait) as is_held:
                if not is_held or is_at(fd, lock):  # the file system has no locks, or the locked file still exists
                    yield
                    return
                # another process discarded the folder before this process got the lock, so try again

    def begin(self, identity: Mapping[str, Any], *, overwrite: bool) -> None:
        """Begin or continue the work of `identity`. Replace other work if `overwrite`, else raise an error."""
        old = read_object(self.state) if files.exists(self.state) else {}
        is_same = old.get("key") == identity["key"]
        if old and not is_same and not overwrite:
            raise self.error(self.changed("unfinished work", old, identity))
        # In a bucket, new files appear one by one, so the old corpus is removed first. `_publish` replaces a local corpus.
        replaces_corpus = self.remote and files.exists(self.manifest)
        if is_same and not replaces_corpus:
            return
        if replaces_corpus or (self.remote and old):
            # if the removal is interrupted, the file `state` marks the remaining files as unfinished work
            files.write_bytes(self.state, json.dumps({"key": None}).encode())
            _remove(self.manifest)
            _remove(self.output)
        _remove(self.work, but=LOCK)
        files.write_bytes(self.state, json.dumps(identity, indent=2).encode())

    def _publish(self) -> None:
        """Rename a local `stage` to the output, and remove the unfinished work."""
        if not self.remote:
            replaced = files.join(self.work, "replaced")  # place of the old corpus until `discard` removes it
            self.finished({"key": ""}, overwrite=True)  # raises an error if another program put files there meanwhile
            try:
                if os.path.isdir(self.output) and os.listdir(self.output):
                    shutil.rmtree(replaced, ignore_errors=True)
                    os.rename(self.output, replaced)
                os.rename(self.stage, self.output)
                files.sync_folder(Path(self.output).parent)
            except OSError as error:
                problem = f"{self.output}: can't be made ({error.strerror})"
                raise StorageError(f"{problem}. Give an output in another folder.") from error
        self.discard()

    def discard(self) -> None:
        """Remove the unfinished work and its folder."""
        _remove(self.work, but=LOCK)
        if not self.remote:
            # errors are ignored: a process that waits for the lock may make a file in the folder at the same time
            shutil.rmtree(self.work, ignore_errors=True)

    @contextlib.contextmanager
    def discarded_if_refused(self) -> Iterator[None]:
        """Discard the unfinished work if the context raises a PrepareError. The work would block a corrected request."""
        try:
            yield
        except PrepareError:
            self.discard()
            raise

    def forget(self, name: str) -> None:
        """Remove the folder `name` in `work`. If `work` holds no unfinished corpus, remove all of it."""
        _remove(files.join(self.work, name))
        if not files.exists(self.state):
            self.discard()


def _remote_files(folder: str) -> list[str]:
    """Return the remote files below `folder`. If `folder` is a file, return `[folder]`."""
    base = folder.split("://", 1)[1]
    with files.remote(folder) as client:
        # only `folder` itself and the files below it, whatever else the client lists
        return [path for path in client.find(folder) if f"{path.lstrip('/')}/".startswith(f"{base}/")]


def _remove(path: str, but: str = "") -> None:
    """Remove the file or folder `path` if it exists. In a local folder, keep the file `but`."""
    if files.is_remote(path):
        paths = _remote_files(path)
        with files.remote(path) as client:
            if any(map(glob.has_magic, paths)):  # `rm` would read `run[1]` as a pattern, and remove files of `run1`
                for name in paths:
                    client.rm_file(name)
            elif paths:
                client.rm(paths)
    elif not os.path.isdir(path):
        Path(path).unlink(missing_ok=True)
    elif but:
        for name in set(os.listdir(path)) - {but}:
            _remove(os.path.join(path, name))
    else:
        shutil.rmtree(path)


def read_object(path: str) -> dict[str, Any]:
    """Return the JSON object of a manifest or identity. Raise a PrepareError if it is damaged."""
    try:
        return msgspec.json.decode(files.read_bytes(path), type=dict[str, Any])
    except ValueError as error:
        raise PrepareError(f"{path}: damaged ({error}). Remove its folder, and prepare again.") from error


def _compared(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an identity to compare. The inputs become a dict by path, so that differences name the file."""
    inputs = {str(entry.get("path")): entry for entry in identity.get("inputs") or []}
    return {name: identity.get(name) for name in ("request", "tokenizer", "code")} | {"inputs": inputs}
