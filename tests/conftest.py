"""Fixtures that several folders of tests share."""

import contextlib
import http
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pytest
from sft_files import documents, write_episodes, write_olmo

from grain_sft.cli.main import main
from grain_sft.storage import files

with contextlib.suppress(ImportError):  # docs/maxtext.md runs the tests of the trainers without Hypothesis
    import hypothesis

    # An example may take any time: a busy machine can stop a process for longer than the 200 ms that Hypothesis allows.
    hypothesis.settings.register_profile("tests", deadline=None)
    hypothesis.settings.load_profile("tests")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print the name of a failed test at once, because a run that is interrupted prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nfailed: {report.nodeid}", file=sys.__stderr__, flush=True)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of cores plus one, because many tests wait for processes, locks and an emulator of a bucket."""
    return len(os.sched_getaffinity(0)) + 1


LONG_FILES = (
    *("code_blocks", "demo", "pipeline", "worker_processes", "batch_digests", "beam", "prepare_run"),
    *("roundtrip", "interrupt", "shard_cache", "chat", "packed_olmo", "audit_log", "plugin", "formats_gcs"),
    *("fuzz_inputs", "bench", "exact_orders", "processes_killed", "file_kinds", "jax_arrays", "full_disk", "soak"),
)
"""Files that take 8 seconds of CPU or more, the longest first, without `test_`. A worker runs a whole file."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of `LONG_FILES` first. Tests that take minutes by design have no time limit."""
    ranks = {f"test_{name}.py": rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
    for item in items:
        if any(map(item.get_closest_marker, ("heavy", "maxtext", "pages", "parity", "processes"))):
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep plans and other caches of all tests in a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Config sections `corpus`: "olmo" (150 documents with sources) and "episodes" (120 documents in 3 shards)."""
    folder = tmp_path_factory.mktemp("corpora")
    olmo = write_olmo(folder / "olmo", documents(150, seed=3, longest=40), sources=True)
    episodes = write_episodes(folder / "episodes", documents(120, 5, longest=40), shards=3)
    return {"olmo": {"path": str(olmo), "eos_token_id": 2, "dtype": "uint16"}, "episodes": {"path": str(episodes)}}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep plans and other caches below `tmp_path`, for tests that check the files of a cache."""
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[tuple]]:
    """`calls_of(owner, name)` returns a list that gets the arguments of each later call of that function."""

    def record(owner: Any, name: str) -> list[tuple]:
        calls, function = [], getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **options: calls.append(given) or function(*given, **options))
        return calls

    return record


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`run_command(*words, status=0)` runs a command that must end with `status`. It returns its output, `out` and `err`."""

    def run(*words: object, status: int = 0) -> Any:
        try:
            found = main([str(word) for word in words])
        except SystemExit as exit:
            found = exit.code
        printed = capsys.readouterr()
        assert found == status and "Traceback" not in printed.err, printed
        return printed

    return run


@pytest.fixture
def listen() -> Iterator[Callable[[logging.Logger, logging.Handler], None]]:
    """`listen(logger, handler)`: until the test ends, `handler` gets the messages of `logger`, from level INFO on."""
    with contextlib.ExitStack() as undone:

        def begin(logger: logging.Logger, handler: logging.Handler) -> None:
            undone.callback(logger.setLevel, logger.level)
            undone.callback(logger.removeHandler, handler)
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)

        yield begin


@pytest.fixture
def small_files():
    """`small_files(size)` makes writes past `size` bytes of a file fail, as on a full disk; None lifts the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[..., Path]:
    """`write_tokens(name, tokens, dtype="uint32")` writes a headerless file below `tmp_path` and returns its path."""

    def write(name: str, tokens: npt.ArrayLike, dtype: npt.DTypeLike = "uint32") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.asarray(tokens).astype(dtype).tofile(path)
        return path

    return write


def honour_generations(download):
    """Return a handler like `download` that also checks and sends generations of objects, as Cloud Storage does."""

    def serve(request, response, storage, *args, **kwargs):
        wanted = request.query.get("generation", [None])[0]
        with contextlib.suppress(Exception):  # `download` reports an object that does not exist
            found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])["generation"]
            if wanted not in (None, found):
                response.status = http.HTTPStatus.NOT_FOUND
                return
            response["x-goog-generation"] = found
        download(request, response, storage, *args, **kwargs)

    return serve


@pytest.fixture(scope="module")
def client():
    """The gcsfs client of a Cloud Storage emulator with one empty bucket, named `bucket`."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # without it, gcsfs asks Google's servers first
        import gcsfs.core

        for _, handlers in emulator.HANDLERS:
            if handlers.get("GET") is emulator.objects.download:
                patch.setitem(handlers, "GET", honour_generations(emulator.objects.download))
        server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
        server.start()
        try:
            daemon = server._api._httpd
            daemon.socket.listen(128)  # room for tests that connect from 32 threads
            daemon.handle_error = lambda request, address: None  # no traceback if a client hangs up early
            patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{daemon.server_address[1]}")
            before = fsspec.get_filesystem_class("gs")
            fsspec.register_implementation("gs", gcsfs.core.GCSFileSystem, clobber=True)
            gcsfs.core.GCSFileSystem.clear_instance_cache()
            yield files.filesystem("gs://bucket")
            gcsfs.core.GCSFileSystem.clear_instance_cache()
            fsspec.register_implementation("gs", before, clobber=True)
        finally:
            server.stop()
