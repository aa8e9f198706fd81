"""Random damage to bytes and to JSON values, drawn from a `random.Random`."""

import copy
import random
from collections.abc import Sequence
from typing import Any

ODD_NUMBERS = (-1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63))


def changed_bytes(data: bytes, draw: random.Random, times=None, reach=None, snippets=(b"",)) -> bytes:
    """Return `data` after `times` random changes in its first `reach` bytes.

    By default, `times` is 1 to 20, and most changes are near the start.
    """
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 20)) if times is None else times):
        if not changed:
            break
        at = draw.randrange(min(draw.choice((16, 128, len(changed))) if reach is None else reach, len(changed)))
        match draw.randrange(7):
            case 0:
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                del changed[at : at + draw.choice((1, 2, 8, 100))]
            case 2:
                changed[at:at] = draw.choice(snippets) or draw.randbytes(draw.choice((1, 4, 64)))
            case 3:
                del changed[draw.choice((at, -draw.randint(1, 8))) :]
            case 4:
                width = draw.choice((1, 2, 4, 8))
                changed[at : at + width] = (draw.choice(ODD_NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
            case 5:
                other = draw.randrange(len(changed))
                changed[at : at + 16] = changed[other : other + 16]
            case 6:
                changed += changed[at : at + draw.choice((1, 100, 1000))]
    return bytes(changed)


def change_json(whole: Any, draw: random.Random, values: Sequence[Any], keys: Sequence[str] = ()) -> None:
    """Replace, rename, remove, insert or increment one value of `whole`, at any depth, unless `whole` is empty."""
    holders = [whole]
    for holder in holders:  # also reaches the holders that the loop adds
        inner = holder.values() if isinstance(holder, dict) else holder
        holders += [each for each in inner if isinstance(each, dict | list) and each]
    if not whole:
        return
    holder, value = draw.choice(holders), copy.deepcopy(draw.choice(values))
    key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = draw.randrange(7)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice((*keys, f"{key}x"))] = holder.pop(key)
    elif kind == 2 and isinstance(holder, dict):
        holder[draw.choice((*keys, "x"))] = value
    elif kind in (1, 2):
        holder.insert(key, draw.choice((value, holder[key])))
    elif kind == 3 and isinstance(holder[key], int):
        holder[key] += draw.choice((-1, 1, 100, 2**40))
    else:
        holder[key] = value
