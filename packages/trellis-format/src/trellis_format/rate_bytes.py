"""Owns the rate byte of slot-major containers: which nibble is which plane.  It must not know codebooks or files.

    rate byte = nibble of the low plane << 4 | nibble of the high plane

The low plane is the first 16 channels of a slot of 32, the high plane the second.  Every reader and writer goes
through `pack_rates` and `unpack_rates`, because equal planes hide a swapped order.
"""

from __future__ import annotations

from trellis_format.errors import FormatValueError
from trellis_format.rates import Rate

__all__ = ["pack_rates", "symmetric_rate", "unpack_rates"]

_NIBBLE_BITS = 4


def pack_rates(low: Rate, high: Rate) -> int:
    """The rate byte of a low and a high plane."""
    return low.nibble << _NIBBLE_BITS | high.nibble


def unpack_rates(byte: int) -> tuple[Rate, Rate]:
    """The rates (low plane, high plane) of a rate byte.

    Raises:
        FormatValueError: if a nibble is illegal; names the byte and the nibble.
    """
    if not 0 <= byte <= 0xFF:
        raise FormatValueError(f"rate byte {byte} is outside 0..255")
    try:
        return Rate.from_nibble(byte >> _NIBBLE_BITS), Rate.from_nibble(byte & 0xF)
    except FormatValueError as error:
        raise FormatValueError(f"rate byte 0x{byte:02X}: {error.message}") from error


def symmetric_rate(byte: int) -> Rate:
    """The one rate of a rate byte whose planes agree.

    Raises:
        FormatValueError: if a nibble is illegal or the planes differ ("symmetric"); has the byte in hexadecimal.
    """
    low, high = unpack_rates(byte)
    if low != high:
        raise FormatValueError(
            f"rate byte 0x{byte:02X} has K = {low} in the low and {high} in the high plane; only symmetric bytes, "
            f"such as 0x{pack_rates(low, low):02X}, describe tiles of one rate"
        )
    return low
