"""An HTTP proxy for the Cloud Storage emulator. The proxy counts requests, and fails as networks and servers do."""

import collections
import contextlib
import http.client
import http.server
import itertools
import os
import random
import re
import socket
import struct
import threading
import time
import zlib

import pytest


class Proxy:
    """A proxy that listens on `address`. For every GET, it draws at random whether and how the request fails.

    Attributes:
      refused: Share of GETs that are answered with status 503 or 429.
      cut: Share of GETs that are answered with half of the body. Half of these state the Content-Length of the whole body.
      reset: Share of GETs whose connection is reset.
      slow: Share of requests that are answered `delay` seconds late.
      latency: Seconds that every answer is late.
      silent: Whether no request is answered.
      body: Fault of the bodies of objects: a key of WRONG_BODIES, or "" for no fault.
      share: Share of the bodies of objects that have this fault.
      before: Function that is called before each answer that has an object's bytes. It gets the number of such requests so far.
      endless: Whether answers to other GETs, for metadata and listings, have no end.
    """

    def __init__(self, target: str) -> None:
        self.target = target.removeprefix("http://")
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.heal()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.server.daemon_threads = True
        self.server.handle_error = lambda request, address: None
        self.server.socket.listen(256)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def heal(self) -> None:
        self.refused = self.cut = self.reset = self.slow = self.delay = self.latency = 0.0
        self.silent = self.endless = False
        self.body, self.share, self.before = "", 1.0, None
        self.random = random.Random(0)
        self.clear()

    def clear(self) -> None:
        self.requests, self.paths, self.failures, self.sent = (collections.Counter() for _ in range(4))
        self.most_at_once = self.at_once = 0

    def close(self) -> None:
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()

    def fault(self) -> str:
        with self.lock:
            drawn = self.random.random()
            for name in ("refused", "cut", "reset"):
                drawn -= getattr(self, name)
                if drawn < 0:
                    self.failures[name] += 1
                    return name
            return ""


@contextlib.contextmanager
def before_emulator():
    """Start a proxy in front of the emulator, and point the clients of the emulator at it."""
    with pytest.MonkeyPatch.context() as patch:
        proxy = Proxy(os.environ["STORAGE_EMULATOR_HOST"])
        patch.setenv("STORAGE_EMULATOR_HOST", proxy.address)
        yield proxy
        proxy.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # send headers and body together
    proxy: Proxy

    def log_message(self, *args):
        pass

    def handle_expect_100(self):
        proceed = super().handle_expect_100()
        self.wfile.flush()
        return proceed

    def forward(self):
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        media = "/download/" in self.path and self.command == "GET"
        with proxy.lock:
            proxy.requests["media" if media else "other"] += 1
            proxy.paths[self.path.split("?")[0]] += 1
            proxy.at_once += 1
            proxy.most_at_once = max(proxy.at_once, proxy.most_at_once)
            pause = proxy.latency + (proxy.delay if proxy.random.random() < proxy.slow else 0)
        while proxy.silent:
            if proxy.stopping.wait(0.05):
                return
        time.sleep(pause)
        with proxy.lock:
            proxy.at_once -= 1
            if media and proxy.before:
                proxy.before(proxy.requests["media"])
        self.answer(body, media)

    def answer(self, body, media):
        proxy = self.proxy
        fault = proxy.fault() if self.command == "GET" else ""
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
            self.close_connection = True
        elif fault == "refused":
            self.send(503 if proxy.random.random() < 0.5 else 429, {}, b'{"error": {"message": "Try later"}}')
        elif proxy.endless and self.command == "GET" and not media:
            self.stream(200, {"Content-Type": "application/json"}, itertools.repeat(b" " * (1 << 20)))
        else:
            status, headers, data = self.ask(body)
            with proxy.lock:
                whole = media and status < 300
                if whole and fault != "cut":
                    proxy.sent[self.path.split("?")[0], self.headers.get("Range")] += 1
                wrong = whole and proxy.body and proxy.random.random() < proxy.share
                if wrong:
                    proxy.failures[proxy.body] += 1
            if wrong:
                WRONG_BODIES[proxy.body](self, status, dict(headers), data)
            else:
                self.send(status, headers, data, cut=fault == "cut")

    def stream(self, status, headers, parts):
        self.begin(status, {**headers, "Connection": "close"}, ("content-length", "transfer-encoding"))
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):  # the client has hung up
            for part in parts:
                self.wfile.write(part)
                self.wfile.flush()
                with self.proxy.lock:
                    self.proxy.requests["streamed"] += len(part)
                if self.proxy.stopping.is_set():
                    return

    def ask(self, body):
        connection = http.client.HTTPConnection(self.proxy.target, timeout=60)
        skipped = ("content-length", "connection", "accept-encoding", "expect")
        headers = {key: value for key, value in self.headers.items() if key.lower() not in skipped}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, dict(response.getheaders()), data

    def begin(self, status, headers, skipped):
        self.send_response_only(status)
        for key, value in headers.items():
            if key.lower() not in skipped:
                self.send_header(key, value)

    def send(self, status, headers, data, cut=False):
        self.begin(status, headers, ("content-length", "connection", "transfer-encoding"))
        length, honest = len(data), self.proxy.random.random() < 0.5
        if self.command == "HEAD":
            length = next((int(value) for key, value in headers.items() if key.lower() == "content-length"), 0)
        if cut:
            data = data[: length // 2]
        self.send_header("Content-Length", str(len(data) if cut and not honest else length))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
        self.close_connection |= cut

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = forward  # noqa: N815


def moved(handler, status, headers, data):
    """Send bytes that begin 4 bytes after the requested bytes. The Content-Range states the range that is sent."""
    headers["Content-Range"] = re.sub(r"\d+(?=[-/])", lambda found: str(int(found[0]) + 4), headers["Content-Range"])
    handler.send(status, headers, data[4:] + bytes(4))


def whole(handler, status, headers, data):
    """Send status 200 and 100 bytes more than the object has. A server that ignores ranges also sends 200 and all bytes."""
    size = int(headers.pop("Content-Range", "/0").split("/")[1])
    handler.send(200, headers, handler.proxy.random.randbytes(size + 100))


def slowly(data):
    for byte in itertools.cycle(data):
        time.sleep(0.05)
        yield bytes([byte])


def bomb():
    """Yield 2 GiB of zeros as 2 MiB of gzip data."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = bytes(1 << 24)
    yield packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    yield from itertools.repeat(packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH), 127)


def resent(change=lambda data: data, **headers):
    return lambda handler, status, stated, data: handler.send(status, {**stated, **headers}, change(data))


def streamed(parts, **headers):
    return lambda handler, status, stated, data: handler.stream(status, {**stated, **headers}, parts(data))


WRONG_BODIES = {
    "twice": resent(lambda data: data + data),
    "moved": moved,
    "whole": whole,
    "endless": streamed(lambda data: itertools.repeat(bytes(1 << 20))),
    "trickling": streamed(lambda data: slowly(data or b"x")),
    "compressed": streamed(lambda data: bomb(), **{"Content-Encoding": "gzip"}),
    "unpacked": resent(**{"x-goog-stored-content-encoding": "gzip"}),
    "of another version": resent(lambda data: bytes(len(data)), **{"x-goog-generation": "1"}),
    "cut": lambda handler, status, headers, data: handler.send(status, headers, data, cut=True),
}
"""Functions that send an object's body with a fault, by the name of the fault."""


def media_bytes(proxy):
    """Return the number of bytes in complete answers, and the number if each distinct range is counted once."""
    total = distinct = 0
    for (_, span), times in proxy.sent.items():
        start, stop = map(int, span.removeprefix("bytes=").split("-"))
        total += times * (stop - start + 1)
        distinct += stop - start + 1
    return total, distinct
