"""A process that renders units: `run`, one line of JSON in and one out for each.

Not multiprocessing: a process of its own runs whatever the caller's main module is, and ends when its input does, that
is with its parent, however that ends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from grain_sft import errors
from grain_sft.prepare.chunks import Chunks
from grain_sft.prepare.inputs import Input, Unit
from grain_sft.prepare.request import Dataset, Request
from grain_sft.prepare.work import Renderer, Work


def encode_work(work: Work, chunks: str) -> str:
    """What a worker has to know, as one line."""
    fields = dataclasses.asdict(work)
    return json.dumps({**fields, "chunks": chunks})


def decode_work(line: str) -> tuple[Work, str]:
    """The work, and the folder of its chunks."""
    fields: dict[str, Any] = json.loads(line)
    request = fields["request"]
    datasets = tuple(Dataset(tuple(entry["paths"]), entry["amount"]) for entry in request["datasets"])
    inputs = tuple(Input.of(entry) for entry in fields["inputs"])
    return Work(Request(**{**request, "datasets": datasets}), inputs, fields["key"]), fields["chunks"]


def error_of(reply: dict[str, Any]) -> errors.GrainSftError:
    """The error that a worker met, as it was raised there."""
    kind = getattr(errors, reply["error"], errors.PrepareError)
    made: errors.GrainSftError = kind(reply["message"])
    return made


def main() -> None:
    """Serve until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no reply
    parent = os.getppid()
    work, folder = decode_work(sys.stdin.readline())
    chunks = Chunks(folder, work.key)
    renderer = Renderer(work)
    for line in sys.stdin:
        fields = json.loads(line)
        unit = Unit(**fields["unit"])
        reply: dict[str, Any] = {"unit": unit.number}
        try:
            made = renderer.chunk(unit, fields["first"])
            if os.getppid() != parent:
                return  # killed; another run may be under way
            chunks.write(unit.number, made)
        except errors.GrainSftError as error:
            reply |= {"error": type(error).__name__, "message": str(error)}
        except MemoryError:
            reply |= {"error": "PrepareError", "message": "a worker has run out of memory. Use fewer workers."}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def run() -> None:
    """As `main`, for a process that is nothing else."""
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
