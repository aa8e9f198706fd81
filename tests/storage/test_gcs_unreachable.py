"""Without a network or credentials, reading a gs:// URL soon fails. The error says which of the two is missing."""

import asyncio
import contextlib
import errno
import http.server
import itertools
import socket
import threading
import time
from unittest import mock

import fsspec
import pytest
from batches import sections, write_config
from google.auth.exceptions import RefreshError

import grain_sft
from grain_sft.cli.main import main
from grain_sft.storage import files
from grain_sft.storage.remote import clients, retries

URL = "gs://some-bucket/data/tokens.npy"
CREDENTIALS = ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_GS", "NO_GCE_CHECK")
REFUSAL = b'{"error": {"code": 401, "message": "Anonymous caller does not have access"}}'


@contextlib.contextmanager
def serving(statuses, body):
    """Answer each request with the next of `statuses` and with `body`. Yield the server's address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(next(statuses))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        do_HEAD = do_GET  # noqa: N815

        log_message = mock.Mock()  # print nothing

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(address)` makes clients use this address for Cloud Storage. They find no credentials."""
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")  # where nothing listens
    monkeypatch.setattr(retries, "FIRST_CONTACT", 0.5)
    return lambda address: monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": address})


@pytest.mark.parametrize("host, server", [("my:44", "http://my:44"), ("default", "https://storage.googleapis.com")])
def test_the_emulators_address_is_read_as_gcsfs_reads_it(machine, monkeypatch, host, server):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
    monkeypatch.setenv("GCE_METADATA_HOST", "http://metadata.google.internal")  # a URL instead of a host
    assert clients.filesystem(URL).server == server


def assert_errors(tmp_path, expected):
    """Check that opening a corpus and loading a config raise an error that names the URL, within a minute."""
    write_config(tmp_path / "config.yaml", sections(URL, 8, layout="windows"))
    for function, argument in (
        (grain_sft.open_corpus, URL),
        (grain_sft.open_corpus, "gs://some-bucket/mix.txt"),
        (grain_sft.load, tmp_path / "config.yaml"),
        (grain_sft.load, "gs://some-bucket/config.yaml"),
    ):
        begin = time.monotonic()
        with pytest.raises(grain_sft.GrainSftError, match=rf"gs://some-bucket/.*{expected}"):
            function(argument)
        assert time.monotonic() - begin < 60  # the default limit is minutes


@pytest.mark.parametrize("silent", [False, True])
def test_a_missing_network_is_named(machine, tmp_path, silent):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if silent:
            listening.listen(64)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        machine(address)
        assert_errors(tmp_path, f"the network does not reach {address}")


def test_missing_and_refused_credentials_are_named(machine, tmp_path, capsys):
    with serving(itertools.repeat(401), REFUSAL) as address:
        machine(address)
        assert_errors(tmp_path, "no credentials of Google Cloud were found")
        assert main(["verify", str(tmp_path / "config.yaml")]) != 0
        for reason in ("invalid_grant: Bad Request", "Reauthentication is needed.", "The credentials do not"):
            refused = mock.Mock(valid=False, **{"refresh.side_effect": RefreshError(reason, {})})
            clients.filesystem(URL).credentials.credentials = refused
            with pytest.raises(grain_sft.GrainSftError, match=rf"can't be renewed \({reason.rstrip('.')}\). Run `gcloud"):
                files.size(URL)
    assert "gcloud auth application-default login" in capsys.readouterr().out


def test_a_web_server_that_fails_or_is_not_reached_is_not_reported_as_a_missing_file(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_CONTACT", 0.5)
    statuses = iter([*[503, 503, 200] * 2, *[404] * 3, *[403] * 9])  # fsspec asks with HEAD, then with GET
    with serving(statuses, bytes(7)) as address:
        found = [ask(f"{address}/tokens.npy") for ask in (files.size, files.exists)]
        assert [*found, next(statuses)] == [7, True, 404]
        for expected in (r"no such file\.", r"no such file, or no permission to read it \(status 403\)"):
            with pytest.raises(grain_sft.GrainSftError, match=expected):
                files.size(f"{address}/tokens.npy")
    with pytest.raises(grain_sft.GrainSftError, match="the network does not reach"):
        files.size("http://127.0.0.1:9/tokens.npy")


def test_a_server_that_answers_another_request_has_been_reached(machine):
    """The slow request times out after 0.5 s. It is repeated only because the server has answered the fast request."""
    pauses = [5, 0]

    async def read_both():
        fast = retries.retried(lambda: asyncio.sleep(0.05, "fast"), 60, server="s3://slow")
        slow = retries.retried(lambda: asyncio.sleep(pauses.pop(0), "slow"), 60, server="s3://slow")
        return await asyncio.gather(fast, slow)

    assert asyncio.run(read_both()) == ["fast", "slow"]


def test_a_server_whose_first_answers_are_failures_has_been_reached(monkeypatch):
    """s3fs raises these errors for 503, for 500, and for statuses that it does not know."""
    monkeypatch.setattr(retries, "FIRST_CONTACT", 0)
    monkeypatch.setattr(retries, "_FIRST_PAUSE", 0.001)
    failures = [OSError(number, "Try again") for number in (errno.EBUSY, errno.EREMOTEIO, errno.EIO)]

    async def attempt():
        if failures:
            raise failures.pop(0)
        return b"body"

    assert asyncio.run(retries.retried(attempt, 60, server="s3://never-reached")) == b"body"


@pytest.mark.parametrize(("status", "repeated"), [(402, False), (429, True), (501, False), (507, True)])
def test_the_status_of_an_answer_that_s3fs_does_not_know_decides_whether_the_request_is_repeated(status, repeated):
    error = OSError(errno.EIO, "An error occurred")
    error.__cause__ = Exception()  # botocore's ClientError
    error.__cause__.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
    assert retries.is_transient(error) == repeated
    for code in ("RequestTimeout", "Throttling"):  # S3 gives these with status 400
        error.__cause__.response["Error"] = {"Code": code}
        assert retries.is_transient(error)
