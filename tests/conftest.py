"""Fixtures that several folders of tests share."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from grain_sft import files


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what fails at once: whoever ends a long run sees no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nfailed: {report.nodeid}", file=sys.__stderr__, flush=True)


WriteTokens = Callable[..., Path]


@pytest.fixture
def listen() -> Iterator[Callable[[logging.Logger, logging.Handler], None]]:
    """`listen(logger, handler)`: until the test ends, `handler` gets what `logger` says, from INFO on."""
    with contextlib.ExitStack() as undone:

        def begin(logger: logging.Logger, handler: logging.Handler) -> None:
            undone.callback(logger.setLevel, logger.level)
            undone.callback(logger.removeHandler, handler)
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)

        yield begin


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """`write_tokens(name, tokens, dtype="uint32")`: a headerless file below `tmp_path`, its folders made as needed."""

    def write(name: str, tokens: npt.ArrayLike, dtype: npt.DTypeLike = "uint32") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.asarray(tokens).astype(dtype).tofile(path)
        return path

    return write


@pytest.fixture(scope="module")
def client():
    """The gcsfs client of an emulator that holds nothing but the bucket `bucket`."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    fsspec = pytest.importorskip("fsspec")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # its client asks Google's servers first
        import gcsfs.core

        server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
        server.start()
        try:
            http = server._api._httpd
            http.socket.listen(128)  # 32 threads scan
            http.handle_error = lambda request, address: None  # a client that hangs up early
            patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{http.server_address[1]}")
            before = fsspec.get_filesystem_class("gs")
            fsspec.register_implementation("gs", gcsfs.core.GCSFileSystem, clobber=True)
            gcsfs.core.GCSFileSystem.clear_instance_cache()
            yield files.filesystem("gs://bucket")
            gcsfs.core.GCSFileSystem.clear_instance_cache()
            fsspec.register_implementation("gs", before, clobber=True)
        finally:
            server.stop()
