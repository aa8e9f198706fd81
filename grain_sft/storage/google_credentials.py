"""Whether this machine has credentials of Google Cloud, found out in seconds.

gcsfs looks for a metadata server for up to two minutes where there is none, and then goes on without credentials.
"""

from __future__ import annotations

import functools
import http.client
import os
from collections.abc import Mapping
from typing import Any

_PROBE_SECONDS, _PROBES = 1.5, 2
_METADATA_SERVER = "169.254.169.254"

MISSING = (
    "no credentials of Google Cloud were found on this machine, and without them its server refuses. Run `gcloud auth "
    "application-default login`, or set $GOOGLE_APPLICATION_CREDENTIALS to a key file"
)
"""Sentence about a request that was refused without credentials."""


def options(configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option of gcsfs that leaves its search out where it finds nothing, or no option.

    Args:
      configured: options of gcsfs that the user gave.
    """
    return {} if "token" in configured or _may_be_found() else {"token": "anon"}


def refused(path: str, error: BaseException, configured: Mapping[str, Any]) -> bool:
    """Whether an error is what Google Cloud Storage answers to a request without credentials, and there are none."""
    status = str(getattr(error, "code", None) or getattr(error, "status", None))
    no_entry = status in ("401", "403") or str(error).startswith("Forbidden")
    real = path.startswith(("gs://", "gcs://")) and not os.environ.get("STORAGE_EMULATOR_HOST")
    return real and no_entry and "token" not in configured and not _may_be_found()


def _may_be_found() -> bool:
    """Whether gcsfs's search is worth the time: a file of credentials, or a metadata server that answers."""
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return True
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    kept = (os.path.join(folder, "application_default_credentials.json"), os.path.expanduser("~/.gcs_tokens"))
    if any(os.path.exists(path) for path in kept):
        return True
    if os.environ.get("NO_GCE_CHECK", "").lower() == "true" or os.environ.get("STORAGE_EMULATOR_HOST"):
        return False
    return _metadata_server(
        os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP") or _METADATA_SERVER
    )


@functools.cache
def _metadata_server(host: str) -> bool:
    """Whether Google's metadata server answers at `host`."""
    for _ in range(_PROBES):
        connection = http.client.HTTPConnection(host, timeout=_PROBE_SECONDS)
        try:
            connection.request("GET", "/", headers={"Metadata-Flavor": "Google"})
            return connection.getresponse().getheader("Metadata-Flavor") == "Google"
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False
