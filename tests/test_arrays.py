"""Arrays of memory that is used again: never while someone holds an array of it."""

from __future__ import annotations

import gc
import pickle
import threading

import numpy as np
import pytest

from grain_sft.source import arrays
from grain_sft.source.arrays import Arrays

SHAPE = (2, 5000)


def address(array):
    return array.ctypes.data


def test_memory_is_used_again_once_it_is_let_go():
    made = Arrays()
    first = made.empty(SHAPE, np.int32)
    place = address(first)
    second = made.empty(SHAPE, np.int32)
    assert address(second) != place
    del first
    assert address(made.empty(SHAPE, np.int32)) == place


@pytest.mark.parametrize(
    "held",
    [
        lambda array: array[1],
        lambda array: array.T[::-1],
        lambda array: array.view(np.uint8),
        lambda array: array.reshape(-1).data,
        lambda array: memoryview(array)[1:],
    ],
)
def test_whoever_holds_a_view_holds_the_memory(held):
    made = Arrays()
    array = made.empty(SHAPE, np.int32)
    array[...] = 7
    kept = held(array)
    del array
    gc.collect()
    for _ in range(3):
        other = made.empty(SHAPE, np.int32)
        other[...] = 9
        del other
    assert not (np.frombuffer(bytes(kept), np.uint8) == 9).any()


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint16, np.int32, np.float32])
def test_arrays_begin_at_a_page_or_half_a_page_after_it(dtype, half):
    made = Arrays().empty(SHAPE, dtype, half)
    assert made.shape == SHAPE and made.dtype == dtype and made.flags.c_contiguous and made.flags.writeable
    assert address(made) % 4096 == half * 2048


def test_what_is_kept_is_bounded(monkeypatch):
    size = 4 * SHAPE[0] * SHAPE[1]
    monkeypatch.setattr(arrays, "_KEPT", 3 * (size + 2 * 4096))
    made = Arrays()
    held = [made.empty(SHAPE, np.int32) for _ in range(10)]
    for number, array in enumerate(held):
        array[...] = number
    assert [int(array[0, 0]) for array in held] == list(range(10))
    assert sum(len(kept) for kept in made._buffers.values()) == 3
    place = address(held[1])
    del held, array
    assert address(made.empty(SHAPE, np.int32)) != place  # the first of those that are kept
    other = [made.empty((1, *SHAPE), np.int32) for _ in range(3)]
    assert [len(kept) for kept in made._buffers.values()] == [3] and len({address(each) for each in other}) == 3


def test_threads_never_share_memory():
    made, wrong = Arrays(), []

    def work(number):
        for _ in range(3000):
            array = made.empty((64,), np.int64)
            array[...] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_pickles_without_its_memory():
    made = Arrays()
    made.empty(SHAPE, np.int32)
    assert len(pickle.dumps(made)) < 1000
    assert pickle.loads(pickle.dumps(made)).empty(SHAPE, np.int32).shape == SHAPE


@pytest.mark.parametrize("put", ["asarray", "device_put", "dlpack", "make_array"])
def test_an_array_that_jax_took_over_stays_as_it_is(put):
    import jax

    made = Arrays()

    def taken(number):
        array = made.empty((8, 4096), np.int32)
        array[...] = number
        if put == "asarray":
            return jax.numpy.asarray(array)
        if put == "dlpack":
            return jax.dlpack.from_dlpack(array)
        if put == "device_put":
            return jax.device_put(array)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.make_array_from_process_local_data(sharding, array)

    held = [taken(number) for number in range(20)]
    gc.collect()
    assert [int(array.min()) for array in held] == [int(array.max()) for array in held] == list(range(20))
