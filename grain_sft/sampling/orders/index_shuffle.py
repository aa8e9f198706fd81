"""Permutations of `grain.experimental.index_shuffle`, computed in numpy for many indices at once.

The library computes one index at a time, in 3 to 6 us. For 512 indices at once, numpy takes 0.3 to 4 us for each index,
depending on the number of rows.

The library enciphers an index to get its row. The cipher is Simon (Beaulieu et al. 2013, "The SIMON and SPECK families of
lightweight block ciphers"). A block is an index with an even number of bits, at least 16. The two halves of a block are called
words. If the result is not below the number of rows, the library enciphers the result again.
"""

import functools

import numpy as np
from grain.experimental import index_shuffle

from grain_sft.types import Ints, UInt64s

_FEW = 512  # for fewer indices, the library is called for each index, which may be faster than numpy
_AT_ONCE = 1 << 14  # indices enciphered at once, so that their words stay in the processor's cache
_LEAST_BITS = 16  # fewest bits of a block
_MASK = (1 << 32) - 1


def has_every_row(num_rows: int) -> bool:
    """Return whether the library's permutations of `num_rows` rows have each row once: false for 4^k + 1 rows, k >= 8."""
    return (num_rows - 1) >> _block_bits(num_rows - 1) == 0


def permuted(indices: Ints, num_rows: int, key: int, rounds: int) -> Ints:
    """Return the row of each of `indices`, int64 [n] in [0, num_rows). No two indices have the same row.

    For 4^k + 1 rows, k >= 8, the blocks of the library have one bit too few. The library gives the last index the row of index
    0, and no index gets the last row. Here, an index chosen by `key` gets the last row. The last index gets the row that the
    library gives to the chosen index.
    """
    last, bits = num_rows - 1, _block_bits(num_rows - 1)
    if has_every_row(num_rows):
        return _library_rows(indices, last, bits, key, rounds)
    chosen = key % num_rows
    # if `chosen` is `last`, `% last` replaces it by 0: any valid index will do, because the next line replaces the row
    rows = _library_rows(np.where(indices == last, chosen % last, indices), last, bits, key, rounds)
    return np.where(indices == chosen, last, rows)


def _library_rows(indices: Ints, last: int, bits: int, key: int, rounds: int) -> Ints:
    """Return `index_shuffle(index, last, key, rounds)` of each of `indices`, int64 [n]. Blocks have `bits` bits."""
    # If fewer than a quarter of the blocks are rows, an index is enciphered many times. All 2^16 blocks at once take 3 ms, and
    # 600 indices one time after the other take 60 ms.
    if last < 1 << bits - 2:
        following = _enciphered(np.arange(1 << bits, dtype=np.uint64), bits // 2, key, rounds).astype(np.int64)
        while (found := following[indices]).max(initial=0) > last:
            # each pass doubles the number of times that a block outside the rows is enciphered
            following = np.where(following > last, following[following], following)
        return found
    if len(indices) < _FEW:
        return np.array([index_shuffle(index, last, key, rounds) for index in indices.tolist()], np.int64)
    rows: Ints = np.empty(len(indices), np.int64)
    for begin in range(0, len(indices), _AT_ONCE):
        blocks = _enciphered(indices[begin : begin + _AT_ONCE].astype(np.uint64), bits // 2, key, rounds)
        while len(outside := np.flatnonzero(blocks > last)):
            blocks[outside] = _enciphered(blocks[outside], bits // 2, key, rounds)
        rows[begin : begin + _AT_ONCE] = blocks
    return rows


def _block_bits(last: int) -> int:
    """Return the number of bits of a block, as the library computes it: one bit too few if `last` is 4^k, k >= 8."""
    bits = (last - 1).bit_length()
    return max(bits + bits % 2, _LEAST_BITS)


def _enciphered(values: UInt64s, word_bits: int, key: int, rounds: int) -> UInt64s:
    """Return the blocks `values` after `rounds` rounds of the cipher. A block has two words of `word_bits` bits each.

    A round turns the pair (left, right) into (right, left ^ f(right) ^ round key). Here f(r) is (r<<<8 & r<<<1) ^ r<<<2, and
    <<< rotates the bits of a word to the left.
    """
    width, mask = np.uint64(word_bits), np.uint64((1 << word_bits) - 1)
    one, two, eight = (np.uint64(count) for count in (1, 2, 8))
    left, right = values >> width, values & mask
    for round_key in _round_keys(key, rounds):
        mixed = right << eight
        mixed |= right >> (width - eight)
        turned = right << one
        turned |= right >> (width - one)
        mixed &= turned
        np.left_shift(right, two, out=turned)
        turned |= right >> (width - two)
        mixed ^= turned
        mixed ^= np.uint64(round_key)
        mixed &= mask  # clear what was shifted out of the words, and the higher bits of the key
        mixed ^= left
        left, right = right, mixed
    return (left << width) | right


@functools.lru_cache(maxsize=64)
def _round_keys(key: int, rounds: int) -> list[int]:
    """Return a list of `rounds` numbers of 32 bits, the key of each round, as C++'s `std::seed_seq{key}` makes them.

    The algorithm, the names and the constants are those of the standard (ISO C++, [rand.util.seedseq]). The words form a ring,
    and all sums and products are modulo 2^32. The standard has another t from 39 rounds on, so `rounds` is in [3, 38].
    """
    n = rounds
    words = [0x8B8B8B8B] * n
    t = 3 if n >= 7 else (n - 1) // 2
    p = (n - t) // 2
    q = p + t
    for k in range(2 * n):
        i, ip, iq, before = k % n, (k + p) % n, (k + q) % n, (k - 1) % n
        if k < n:
            mixed = words[i] ^ words[ip] ^ words[before]
            r1 = 1664525 * (mixed ^ (mixed >> 27)) & _MASK
            # step 0 adds the number of seeds (1), and step 1 adds the one seed (`key`)
            seed = {0: 1, 1: i + key}.get(k, i)
            second = r1 + seed & _MASK
            words[ip], words[iq] = words[ip] + r1 & _MASK, words[iq] + second & _MASK
        else:
            mixed = words[i] + words[ip] + words[before] & _MASK
            r3 = 1566083941 * (mixed ^ (mixed >> 27)) & _MASK
            second = r3 - i & _MASK
            words[ip], words[iq] = words[ip] ^ r3, words[iq] ^ second
        words[i] = second
    return words
