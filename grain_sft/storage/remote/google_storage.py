"""gcsfs with the retries, the deadlines and the messages of `retries`. Imports gcsfs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Callable
from typing import Any

from gcsfs.core import GCSFileSystem

from grain_sft.storage import activity
from grain_sft.storage.remote.retries import Limits, WrongBodyError, retried


class GoogleStorage(GCSFileSystem):
    """gcsfs's file system without its own retries, which take half a minute and give no reason.

    The class that gcsfs registers would also ask by gRPC for the type of each bucket, for a minute where gRPC is not answered.
    """

    retries_requests = True
    _request = GCSFileSystem._request.__wrapped__

    @property
    def server(self) -> str:
        """Address of the server."""
        return str(self.base).split("/storage/", 1)[0]

    async def _call(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        """Make a request again until it succeeds; gcsfs makes all of its requests here."""
        call = super()._call

        async def once() -> Any:
            if self.credentials.credentials is not None:
                await _in_a_thread(self.credentials.maybe_refresh)
            try:
                return await call(method, path, *args, **options)
            except json.JSONDecodeError as error:
                raise WrongBodyError(f"an answer of {len(error.doc)} characters that breaks off") from error

        bounded, seconds = method.upper() == "GET", Limits.from_environment().seconds
        with activity.open_request(f"{method} {path}"):
            return await retried(once, seconds, bounded=bounded, server=self.server)


async def _in_a_thread(function: Callable[[], object]) -> None:
    """Call a function that may wait for minutes, in a thread that holds up neither the loop nor the end of the process."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=call, daemon=True).start()
    await asyncio.wrap_future(future)
