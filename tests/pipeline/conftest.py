"""Fixtures of tests that raise exceptions inside `next`."""

import sys
import threading

import pytest


@pytest.fixture
def quiet_finalizers(monkeypatch):
    """Ignore exceptions that arrive in a finalizer. They could interrupt the hook by which pytest reports them."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.fixture
def no_tracer():
    """Switch off tracers, such as that of `coverage`, in this thread and in new ones.

    In CPython 3.11, a traced thread cannot begin a call while another thread has an exception that was set, by
    `PyThreadState_SetAsyncExc`, and not raised yet. If the other thread waits for a lock of the traced one, both wait for ever.
    """
    tracer, tracer_of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    yield
    threading.settrace(tracer_of_threads)
    sys.settrace(tracer)
