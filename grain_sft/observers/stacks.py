"""Places: what a thread is doing, or a worker process, as a person would say it.

Nothing is noted down while a batch is made. Where a thread is, its stack says: of the functions on it, some tell which file
they read, or which transform they run.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from grain_sft.observers import in_flight as making
from grain_sft.observers import requests

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

Variables = Mapping[str, Any]

_MOST = 4  # requests that are named
_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a disk or network file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def of_makers(pipeline: Pipeline | None) -> list[str]:
    """Of each thread that makes a batch of `pipeline` (None: of any): which step, since when, and where it is; then the
    remote files that are waited for."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for each in making.now():
        if pipeline is not None and each.pipeline is not pipeline:
            continue
        frame = frames.get(each.thread)
        where = "gone" if frame is None else place(frame)
        seconds = time.perf_counter() - each.since
        lines.append(f"{names.get(each.thread, each.thread)}: making step {each.step} for {seconds:.1f} s: {where}")
    waiting = requests.open_requests()
    lines += waiting[:_MOST]
    if len(waiting) > _MOST:
        lines.append(f"and {len(waiting) - _MOST} more such requests")
    return lines


def of_workers(processes: Sequence[Any], turn: int) -> list[str]:
    """Of worker processes: whose turn it is, and what the system says of each."""
    states = [f"{process.pid} is {_state(process.pid)}" for process in processes]
    if not states:
        return ["no worker process is alive"]
    return [f"it is to come from worker process {processes[turn % len(states)].pid}; {', '.join(states)}"]


def place(frame: FrameType) -> str:
    """Where a thread is that is at `frame`."""
    told, outer = "", _landmarks()
    at: FrameType | None = frame
    while at is not None and not told:
        tell = outer.get(at.f_code)
        if tell is not None:
            told = _said(tell, at.f_locals)
        at = at.f_back
    seen = _own(frame)
    line = f"{_short(seen.f_code.co_filename)}:{seen.f_lineno} in {seen.f_code.co_name}"
    return f"{told} ({line})" if told else line


def _said(tell: Callable[[Variables], str], variables: Variables) -> str:
    try:
        return tell(variables)
    except (KeyError, AttributeError, IndexError):  # not that far yet
        return ""


def _own(frame: FrameType) -> FrameType:
    """The innermost function that is of no library, but for this one."""
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        library = name.startswith((*_LIBRARIES, "<frozen")) or "/site-packages/" in name
        if name.startswith(_PACKAGE) or not library:
            return at
        at = at.f_back
    return frame


def _short(path: str) -> str:
    return os.path.relpath(path, os.path.dirname(_PACKAGE)) if path.startswith(_PACKAGE) else path


@functools.cache
def _landmarks() -> Mapping[CodeType, Callable[[Variables], str]]:
    """By function, what to say of a thread in it, given its variables."""
    from grain_sft.pipeline import Pipeline
    from grain_sft.source.row_reader import RowReader
    from grain_sft.storage import remote_requests
    from grain_sft.storage.local_file import LocalFile
    from grain_sft.storage.shard_cache import ShardCache
    from grain_sft.storage.shard_reader import ShardReader

    return {
        LocalFile.__init__.__code__: lambda v: f"opening {v['shard'].path}",
        LocalFile.look.__code__: lambda v: f"looking whether {v['self'].shard.path} has changed",
        LocalFile.read_rest.__code__: lambda v: f"reading {v['self'].shard.path} at byte {v['offset'] + v['done']}",
        ShardReader.fill.__code__: lambda v: f"reading {v['file'].shard.path} at byte {v['offset']}",
        RowReader.read.__code__: _reading_rows,
        ShardReader._copy.__code__: _copying,
        ShardCache._fill.__code__: _filling,
        ShardCache.read.__code__: _waiting_for_block,
        remote_requests._each.__code__: lambda v: f"asking for {len(v['jobs'])} parts of remote files",
        Pipeline._batch.__code__: lambda v: f"in the transform {type(v['transform']).__name__}",
    }


def _reading_rows(v: Variables) -> str:
    files, offsets = v["files"], v["offsets"]
    others = f" or one of {len(offsets) - 1} other rows" if offsets[1:] else ""
    return f"reading {files[0].shard.path} at byte {offsets[0]}{others}"


def _copying(v: Variables) -> str:
    return f"reading {len(v['sizes'])} pieces of {v['files'][0].shard.path} and {len(v['files']) - 1} other files"


def _filling(v: Variables) -> str:
    job, _ = v["jobs"][0]
    return (
        f"downloading {len(v['jobs'])} blocks into the shard cache, such as bytes {job.block.start} to {job.block.stop} of "
        f"{job.file.path}"
    )


def _waiting_for_block(v: Variables) -> str:
    job = v["pending"][0]
    holder = _holder(job.block.path(v["self"]._folder) + ".part")
    by = "another process" if holder is None else f"process {holder}"
    return (
        f"waiting for bytes {job.block.start} to {job.block.stop} of {job.file.path}, which {by} downloads into the shard "
        "cache"
    )


def _holder(path: str) -> int | None:
    """The process that holds the lock of a file, as the system tells."""
    try:
        inode = str(os.stat(path).st_ino)
        with open("/proc/locks") as locks:
            fields = [line.split() for line in locks]
    except OSError:
        return None
    held = (each for each in fields if "FLOCK" in each and "->" not in each and each[5].rpartition(":")[2] == inode)
    return next((int(each[4]) for each in held), None)


def _state(pid: int | None) -> str:
    """What the system says of a process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return _STATES.get(letter, letter)
