"""`Arrays` reuses the memory of its arrays, but not while an array in the memory or a view of it is held."""

import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from grain_sft.source import arrays
from grain_sft.source.arrays import Arrays

SHAPE = (2, 5000)


def address(array):
    return array.ctypes.data


def filled(made, shape, number):
    array = made.empty(shape, np.int32)
    array[...] = number
    return array


VIEWS = {
    "row": lambda array: array[1],
    "transposed": lambda array: array.T[::-1],
    "bytes": lambda array: array.view(np.uint8),
    "buffer": lambda array: array.reshape(-1).data,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_is_used_again_once_no_view_of_it_is_held(view):
    made = Arrays()
    first = filled(made, SHAPE, 7)
    place, held = address(first), view(first)
    del first
    gc.collect()
    assert place not in [address(filled(made, SHAPE, 9)) for _ in range(3)]
    assert not (np.frombuffer(bytes(held), np.uint8) == 9).any()
    del held
    assert address(made.empty(SHAPE, np.int32)) == place


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("dtype", [np.bool_, np.uint16, np.int32, np.float32])
def test_arrays_begin_at_a_page_or_half_a_page_after_it(dtype, half):
    made = Arrays().empty(SHAPE, dtype, half)
    assert made.shape == SHAPE and made.dtype == dtype and made.flags.c_contiguous and made.flags.writeable
    assert address(made) % 4096 == half * 2048


def test_the_memory_that_is_kept_is_bounded(monkeypatch):
    size = 4 * SHAPE[0] * SHAPE[1]
    monkeypatch.setattr(arrays, "_KEPT", 3 * (size + 2 * 4096))
    made = Arrays()
    held = [filled(made, SHAPE, number) for number in range(10)]
    assert [int(array[0, 0]) for array in held] == list(range(10))
    assert sum(len(kept) for kept in made._buffers.values()) == 3
    place = address(held[1])
    del held
    assert address(made.empty(SHAPE, np.int32)) != place  # the first kept buffer is reused, not the second
    other = [made.empty((1, *SHAPE), np.int32) for _ in range(3)]
    assert [len(kept) for kept in made._buffers.values()] == [3] and len({address(each) for each in other}) == 3


def test_threads_never_share_memory():
    made = Arrays()

    def work(number):
        return all((filled(made, (64,), number) == number).all() for _ in range(3000))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_arrays_are_pickled_without_their_memory():
    made = Arrays()
    made.empty(SHAPE, np.int32)
    assert len(pickle.dumps(made)) < 1000
    assert pickle.loads(pickle.dumps(made)).empty(SHAPE, np.int32).shape == SHAPE


def make_global(array):
    return jax.make_array_from_process_local_data(jax.sharding.SingleDeviceSharding(jax.devices()[0]), array)


@pytest.mark.parametrize("take_over", [jax.numpy.asarray, jax.device_put, jax.dlpack.from_dlpack, make_global])
def test_an_array_that_jax_took_over_stays_as_it_is(take_over):
    made = Arrays()
    held = [take_over(filled(made, (8, 4096), number)) for number in range(20)]
    gc.collect()
    assert [int(array.min()) for array in held] == [int(array.max()) for array in held] == list(range(20))
