"""gs:// without a network or without credentials: an error in seconds, which says which of the two is missing."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

import grain_sft
from grain_sft.cli.main import main
from grain_sft.storage.remote import clients, retries

fsspec = pytest.importorskip("fsspec")
gcsfs = pytest.importorskip("gcsfs")

URL = "gs://some-bucket/data/tokens.npy"


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request with one status."""

    status = 401

    def do_GET(self):
        error = {"code": self.status, "message": "Anonymous caller does not have storage.objects.get access"}
        body = json.dumps({"error": error}).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve(monkeypatch):
    """`serve(status)`: the address of a server that gives every request this answer."""
    servers = []

    def start(status):
        servers.append(
            http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answers,), {"status": status}))
        )
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """`machine(address)`: a machine without credentials, for which Cloud Storage is at this address."""
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "FSSPEC_GS", "NO_GCE_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")  # where nothing listens
    monkeypatch.setattr(retries, "FIRST_CONTACT", 0.5)

    def be(address):
        monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": address})

    return be


def ways(tmp_path):
    """Opening a corpus, loading a config, and a command, each with a URL."""
    (tmp_path / "config.yaml").write_text(
        f"corpus: {{path: {URL}}}\nlayout: {{kind: windows, sequence_length: 8}}\nsampler: {{global_batch_size: 1, seed: 0}}\n"
    )
    return [
        lambda: grain_sft.open_corpus(URL),
        lambda: grain_sft.open_corpus("gs://some-bucket/mix.txt"),
        lambda: grain_sft.load(tmp_path / "config.yaml"),
        lambda: grain_sft.load("gs://some-bucket/config.yaml"),
    ]


@pytest.mark.parametrize("silent", [False, True])
def test_a_network_that_is_not_there_is_named(machine, tmp_path, silent):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if silent:
            listening.listen(64)
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        machine(address)
        for way in ways(tmp_path):
            begin = time.monotonic()
            with pytest.raises(
                grain_sft.GrainSftError, match=rf"gs://some-bucket/.*the network does not reach {address}"
            ):
                way()
            assert time.monotonic() - begin < 15


def test_missing_credentials_are_named(machine, serve, tmp_path, capsys):
    machine(serve(401))
    for way in ways(tmp_path):
        with pytest.raises(
            grain_sft.GrainSftError, match=r"gs://some-bucket/.*no credentials of Google Cloud were found"
        ):
            way()
    assert main(["verify", str(tmp_path / "config.yaml")]) != 0
    assert "gcloud auth application-default login" in capsys.readouterr().out


def test_the_times_together_are_under_ten_seconds():
    assert retries.FIRST_CONTACT + clients.PROBES * clients.PROBE_SECONDS < 10


@pytest.mark.heavy
@pytest.mark.parametrize("metadata", ["127.0.0.1:1", "10.255.255.1"])
def test_without_a_network_the_command_line_ends_within_fifteen_seconds(tmp_path, metadata):
    """The real client and Google's real address, which the machine that runs this does not reach."""
    environment = {**os.environ, "HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path), "GCE_METADATA_HOST": metadata}
    for name in ("STORAGE_EMULATOR_HOST", "FSSPEC_GS", "GOOGLE_APPLICATION_CREDENTIALS"):
        environment.pop(name, None)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "grain_sft", "index", URL, "--output", str(tmp_path / "index.json")],
        env=environment,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - begin
    print(f"{seconds:.1f} s: {done.stderr}")
    assert done.returncode and ("does not reach" in done.stderr or "no credentials" in done.stderr)
    assert seconds < 15
