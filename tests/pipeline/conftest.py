"""Fixtures of tests that raise exceptions inside `next`."""

import sys
import threading

import pytest


@pytest.fixture
def quiet_finalizers(monkeypatch):
    """Ignore exceptions in finalizers, because another exception could interrupt pytest's hook for them."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.fixture
def no_tracer():
    """Switch off tracers, such as that of `coverage`, in this thread and in new ones.

    `PyThreadState_SetAsyncExc` sets an exception in a thread, which raises it later. Until then, CPython 3.11 lets no
    traced thread begin a call. If the thread with the exception waits for a lock of a traced thread, both wait forever.
    """
    tracer, tracer_of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    yield
    threading.settrace(tracer_of_threads)
    sys.settrace(tracer)
