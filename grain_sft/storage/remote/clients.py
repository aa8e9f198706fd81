"""fsspec file systems (clients of buckets and web servers) with the options of grain_sft.

This module searches for credentials of Google Cloud before gcsfs does. A machine in Google Cloud gets them from a metadata
server. On other machines, gcsfs would wait up to two minutes for this server. This module waits at most 3 seconds.
"""

import contextlib
import functools
import http.client
import os
from typing import Any

from grain_sft.errors import CorpusFileError, MissingExtraError
from grain_sft.storage.remote.retries import Limits, status_of

PROBES, PROBE_SECONDS = 2, 1.5  # requests to a metadata server, and the time limit of each
NO_CREDENTIALS = (
    "no credentials of Google Cloud were found on this machine, and the server refused an anonymous request. Run `gcloud "
    "auth application-default login`, or set $GOOGLE_APPLICATION_CREDENTIALS to a key file"
)


def filesystem(path: str) -> Any:
    """Return the fsspec file system of a URL. fsspec and its clients are imported on first use.

    Users set options, such as credentials, in fsspec's own configuration: $FSSPEC_GS='{"requester_pays": true}' or a file in
    ~/.config/fsspec. Listings are not cached, so that a changed file is noticed.

    Raises:
      CorpusFileError: fsspec can't make the file system.
      MissingExtraError: A package that the file system needs is not installed.
    """
    import fsspec

    protocol = path.split("://", 1)[0]
    options: dict[str, Any] = {"use_listings_cache": False}
    seconds = Limits.from_environment().seconds
    try:
        if protocol in ("gs", "gcs"):
            import aiohttp

            from grain_sft.storage.remote.google_storage import GoogleStorage

            if "token" not in _configured("gs", "gcs") and not _may_find_credentials():
                options["token"] = "anon"  # anonymous access, for public files; gcsfs then does not search for credentials
            if "requests_timeout" not in _configured("gs", "gcs"):  # by default, gcsfs waits for an answer without end
                options["requests_timeout"] = aiohttp.ClientTimeout(sock_read=seconds)
            if emulator := _emulator():
                # gcsfs would read $STORAGE_EMULATOR_HOST at each request: a change would move open files to another server
                options["endpoint_url"] = emulator
            return GoogleStorage(session_kwargs=_session_options("session_kwargs", "gs", "gcs"), **options)
        if protocol in ("s3", "s3a"):
            from grain_sft.storage.remote.s3_storage import S3Storage

            configured = _configured("s3", "s3a").get("config_kwargs", {})
            return S3Storage(config_kwargs={"retries": {"total_max_attempts": 1}, **configured}, **options)
        if protocol in ("http", "https"):
            options["client_kwargs"] = _session_options("client_kwargs", protocol)
        return fsspec.filesystem(protocol, **options)
    except ImportError as error:
        if protocol in ("s3", "s3a"):
            raise MissingExtraError.of(f"{path}: reading it", "s3fs", "s3") from error
        raise MissingExtraError(f"{path}: reading it needs another package: {error}") from error
    except Exception as error:  # each client raises its own kinds of exceptions
        problem = f"{path}: fsspec can't make a file system for {protocol}:// ({type(error).__name__}: {error})"
        raise CorpusFileError(f"{problem}. Check the protocol, and the token and other options of fsspec.") from error


def lacks_credentials(path: str, error: BaseException) -> bool:
    """Return whether Google Cloud Storage refused a request because this machine has no credentials."""
    return (
        path.startswith(("gs://", "gcs://"))
        and not _emulator()
        and (status_of(error) in (401, 403) or str(error).startswith("Forbidden"))
        and "token" not in _configured("gs", "gcs")
        and not _may_find_credentials()
    )


def _emulator() -> str:
    """Return the URL of the emulator in $STORAGE_EMULATOR_HOST; "" for Google's server, which gcsfs also calls "default"."""
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if host in ("", "default"):
        return ""
    return host if "://" in host else f"http://{host}"


def _configured(*protocols: str) -> dict[str, Any]:
    """Return the options of a file system in fsspec's own configuration, such as $FSSPEC_GS."""
    from fsspec.config import conf

    return {key: value for protocol in protocols for key, value in conf.get(protocol, {}).items()}


def _session_options(key: str, *protocols: str) -> dict[str, Any]:
    """Return the options of an aiohttp session: those that `key` has in fsspec's configuration, and `CheckedResponse`."""
    from grain_sft.storage.remote.checked_response import CheckedResponse

    configured = dict(_configured(*protocols).get(key, {}))
    # Accept no compressed responses: their sizes differ from the sizes of the files.
    headers = {**configured.get("headers", {}), "Accept-Encoding": "identity"}
    return {**configured, "headers": headers, "response_class": CheckedResponse}


def _may_find_credentials() -> bool:
    """Return whether $GOOGLE_APPLICATION_CREDENTIALS is set, a file of credentials exists, or a metadata server answers."""
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    of_gcloud, of_gcsfs = f"{folder}/application_default_credentials.json", os.path.expanduser("~/.gcs_tokens")
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or os.path.exists(of_gcloud) or os.path.exists(of_gcsfs):
        return True
    # $NO_GCE_CHECK is google-auth's variable for machines outside of Google Cloud. An emulator needs no credentials.
    if os.environ.get("NO_GCE_CHECK", "").lower() == "true" or _emulator():
        return False
    host = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP") or "169.254.169.254"
    return _answers_as_metadata_server(host)


@functools.cache
def _answers_as_metadata_server(host: str) -> bool:
    for _ in range(PROBES):
        try:
            with contextlib.closing(http.client.HTTPConnection(host, timeout=PROBE_SECONDS)) as connection:
                connection.request("GET", "/", headers={"Metadata-Flavor": "Google"})
                return connection.getresponse().getheader("Metadata-Flavor") == "Google"
        except (OSError, http.client.HTTPException):
            continue
    return False
