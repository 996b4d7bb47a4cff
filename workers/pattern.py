"""The bytes of pattern rows: every row of KV says whose it is, and which role, layer, head and token.

::

    place   | whose   10 | role 8 | layer 12 | head 12 | token 22 |      64 bits
    row     | scramble(place) | + STEP | + 2 * STEP | ...               64-bit words, cut off at the row's end

Rows belong to a request, or, where its tokens are known, to the prefix that ends with their token, as a model's do:
requests with the same prefix may then use each other's. `scramble` can be undone, so a misplaced row names itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from unikv.ids import RequestId
from unikv.layer_spec import STANDARD_ROLES
from workers.page_bytes import BufferBytes, Bytes, LiveUnits

BITS: Final = {"request": 10, "role": 8, "layer": 12, "head": 12, "token": 22}
"""Width of each number in a place; the request's is its id modulo 1024, or a hash of the prefix."""
_FIRST_EXTRA_ROLE: Final = 16
_WORD_BYTES: Final = 8
_MASK: Final = 2**64 - 1
_STEP: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS: Final = (30, 27, 31)
_PRIME: Final = 1_000_003
_MODULUS: Final = 2**61 - 1
Words = NDArray[np.uint64]


class Place(NamedTuple):
    """What a row says of itself. `request` is the id modulo 1024 or a prefix's number, `role` a number."""

    request: int
    role: int
    layer: int
    head: int
    token: int


def scramble(places: Words) -> Words:
    """Return one well-mixed word per place, all different (finaliser of splitmix64, Steele et al. 2014)."""
    words = places + np.uint64(_STEP)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        words = (words ^ words >> np.uint64(shift)) * np.uint64(factor)
    return words ^ words >> np.uint64(_SHIFTS[-1])


def unscramble(word: int) -> Place:
    """Return the place whose row begins with `word`."""
    word = _undo_shift(word, _SHIFTS[-1])
    for shift, factor in zip(reversed(_SHIFTS[:-1]), reversed(_FACTORS), strict=True):
        word = _undo_shift(word * pow(factor, -1, 2**64) & _MASK, shift)
    packed, fields = (word - _STEP) & _MASK, []
    for bits in reversed(BITS.values()):
        fields.append(packed & (1 << bits) - 1)
        packed >>= bits
    return Place(*reversed(fields))


def role_number(role: str) -> int:
    """Return the number of a role, the same on every rank, whichever roles it holds."""
    if role in STANDARD_ROLES:
        return STANDARD_ROLES.index(role)
    return _FIRST_EXTRA_ROLE + crc32(role.encode()) % ((1 << BITS["role"]) - _FIRST_EXTRA_ROLE)


def request_number(request_id: RequestId) -> int:
    """Return what a place keeps of a request's id."""
    return int(request_id) % (1 << BITS["request"])


def owners(request_id: RequestId, prompt: Sequence[int], prompt_tokens: int) -> Words:
    """Return whose the rows of every token are, ``[prompt_tokens]``."""
    if not prompt:
        return np.full(prompt_tokens, request_number(request_id), dtype=np.uint64)
    prefix, numbers = 0, []
    for token in prompt[:prompt_tokens]:
        prefix = (prefix * _PRIME + token + 1) % _MODULUS
        numbers.append(prefix)
    words: Words = scramble(np.array(numbers, dtype=np.uint64)) & np.uint64((1 << BITS["request"]) - 1)
    return words


def expected_rows(buffer: BufferBytes, live: LiveUnits, owners: Words) -> Bytes:
    """Return the pattern of live units, ``[units, heads, unit_tokens, row_bytes]``; `owners` has one of every token."""
    heads = np.arange(buffer.heads.lo, buffer.heads.hi, dtype=np.uint64)
    steps = np.arange(live.unit_tokens, dtype=np.uint64)
    tokens = live.units[:, None].astype(np.uint64) * np.uint64(live.unit_tokens) + steps
    whose = owners[np.minimum(tokens, np.uint64(len(owners) - 1))]  # behind the prompt nobody looks
    for field, number in (("role", role_number(buffer.role)), ("layer", buffer.layer_id)):
        whose = whose << np.uint64(BITS[field]) | np.uint64(number)
    whose <<= np.uint64(BITS["head"] + BITS["token"])
    places = whose[:, None, :] | heads[None, :, None] << np.uint64(BITS["token"]) | tokens[:, None, :]
    words = np.arange(-(-buffer.row_bytes // _WORD_BYTES), dtype=np.uint64) * np.uint64(_STEP)
    rows: Bytes = (scramble(places)[..., None] + words).view(np.uint8)[..., : buffer.row_bytes]
    return rows


def read_row(row: bytes) -> Place | None:
    """Return the place a row begins like, None where it begins like none. Rows below 8 bytes cannot tell."""
    words = [int.from_bytes(row[at : at + _WORD_BYTES], "little") for at in (0, _WORD_BYTES)]
    followed = len(row) >= 2 * _WORD_BYTES
    if len(row) < _WORD_BYTES or (followed and (words[1] - words[0]) & _MASK != _STEP):
        return None
    return unscramble(words[0])


def _undo_shift(word: int, shift: int) -> int:
    """Undo ``word ^ word >> shift``."""
    found = word
    for _ in range(64 // shift):
        found = word ^ found >> shift
    return found
