"""File system of Google Cloud Storage. Importing this module needs gcsfs."""

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Callable
from typing import Any

from gcsfs.core import GCSFileSystem

from grain_sft.storage import activity
from grain_sft.storage.remote.retries import Limits, RefusedError, WrongBodyError, retried


class GoogleStorage(GCSFileSystem):
    """gcsfs file system with the retries of module `retries`. gcsfs's own retries take half a minute and report no reason.

    The class that gcsfs registers for gs:// is not used: it asks for the type of each bucket by gRPC, which may take a minute.
    """

    _request = GCSFileSystem._request.__wrapped__  # the method without its decorator, which retries

    @property
    def server(self) -> str:
        return str(self.base).split("/storage/", 1)[0]

    async def _call(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        """Make a request with retries. gcsfs calls this for all of its requests."""
        call = super()._call

        async def attempt() -> Any:
            """Renew the credentials if needed, then make the request once.

            An answer that breaks off is a `WrongBodyError`. Credentials that can't be renewed are a `RefusedError`.
            """
            try:
                if self.credentials.credentials is not None:
                    await _in_a_thread(self.credentials.maybe_refresh)
                return await call(method, path, *args, **options)
            except json.JSONDecodeError as error:
                raise WrongBodyError(f"an answer of {len(error.doc)} characters that breaks off") from error
            except Exception as error:
                arguments = getattr(error.__cause__, "args", ())
                reason = str(arguments[0]) if arguments else ""  # google-auth's reason, which gcsfs's error lacks
                if reason.startswith(("invalid_grant", "Reauthentication", "The credentials do not")):
                    fix = "Run `gcloud auth application-default login`, or give another token or key file"
                    raise RefusedError(f"Google's credentials can't be renewed ({reason.rstrip('.')}). {fix}") from error
                raise

        seconds = Limits.from_environment().seconds  # for all attempts
        with activity.open_request(f"{method} {path}"):  # the watchdog names requests that take long
            # only a GET is cancelled after a while and made again: an upload may take long
            return await retried(attempt, seconds, bounded=method.upper() == "GET", server=self.server)


async def _in_a_thread(function: Callable[[], object]) -> None:
    """Call `function`, which may block for minutes, in a daemon thread: the process can exit meanwhile."""
    future: concurrent.futures.Future[object] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    await asyncio.wrap_future(future)
