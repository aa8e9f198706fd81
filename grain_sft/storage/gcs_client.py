"""gcsfs with the retries, the deadlines and the messages of `remote_requests`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import Callable
from typing import Any

from grain_sft.storage.activity import open_request
from grain_sft.storage.remote_bodies import WrongBodyError
from grain_sft.storage.remote_files import Limits
from grain_sft.storage.remote_requests import reached, retried, server_of

_BUCKET_TYPE_SECONDS = 10.0


@functools.cache
def asked_once(kind: Any) -> Any:
    """A kind of gcsfs file system whose requests are made again as this module does it; the kind itself, where gcsfs's
    own way can't be taken out."""
    request = getattr(getattr(kind, "_request", None), "__wrapped__", None)
    if request is None:
        return kind

    async def _request(self: Any, method: str, path: str, *args: Any, **options: Any) -> Any:
        async def once() -> Any:
            if self.credentials.credentials is not None:
                await _in_a_thread(self.credentials.maybe_refresh)
            return await request(self, method, path, *args, **options)

        with open_request(f"{method} {path}"):
            return await retried(
                once, Limits.from_environment().seconds, bounded=method.upper() == "GET", server=server_of(self, path)
            )

    async def _call(self: Any, method: str, path: str, *args: Any, **options: Any) -> Any:
        async def once() -> Any:
            try:
                return await kind._call(self, method, path, *args, **options)
            except json.JSONDecodeError as error:
                raise WrongBodyError(f"an answer of {len(error.doc)} characters that breaks off") from error

        return await retried(
            once, Limits.from_environment().seconds, bounded=False, asks=False, server=server_of(self, path)
        )

    added = {"_request": _request, "_call": _call, "retried_by_grain_sft": True}
    if hasattr(kind, "_lookup_bucket_type") and hasattr(kind, "_is_bucket_hns_enabled"):
        added |= _bucket_types(kind)
    return type(kind.__name__, (kind,), added)


def _bucket_types(kind: Any) -> dict[str, Any]:
    """Methods of a kind of gcsfs file system that asks by gRPC what type a bucket has, for a minute where gRPC is not
    answered. Here it asks a server that has answered other requests, for `_BUCKET_TYPE_SECONDS`."""

    async def _lookup_bucket_type(self: Any, bucket: str) -> Any:
        from gcsfs.extended_gcsfs import BucketType
        from gcsfs.retry import HttpError

        if server_of(self, "") not in reached:
            with contextlib.suppress(OSError, HttpError, ValueError):  # such as 403: the server was reached
                await self._request("GET", "b/{}", bucket)
        try:
            return await asyncio.wait_for(kind._lookup_bucket_type(self, bucket), _BUCKET_TYPE_SECONDS)
        except TimeoutError:
            self._storage_layout_cache[bucket] = BucketType.UNKNOWN
            return BucketType.UNKNOWN

    async def _is_bucket_hns_enabled(self: Any, bucket: str) -> bool:
        if server_of(self, "") not in reached:  # a listing says the same, in other words
            return False
        return bool(await kind._is_bucket_hns_enabled(self, bucket))

    return {"_lookup_bucket_type": _lookup_bucket_type, "_is_bucket_hns_enabled": _is_bucket_hns_enabled}


async def _in_a_thread(function: Callable[[], object]) -> None:
    """Call a function that may wait for minutes, in a thread that holds up neither the loop nor the end of the process."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, daemon=True).start()
    await done.wait()
    if raised:
        raise raised[0]
