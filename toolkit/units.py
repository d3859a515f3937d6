"""Parse quantities with units (``parse_...``), and format quantities for people (``show_...``).

Inside the package all quantities are in SI base units: seconds, bytes, bytes per second.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from ddltool.errors import InputError

# Network rates count bits and powers of ten; memory sizes count bytes, with Ki/Mi/Gi as powers of two.
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_TIME = {
    "ns": "1e-9",
    "us": "1e-6",
    "µs": "1e-6",
    "ms": "1e-3",
    "s": "1",
    "m": "60",
    "min": "60",
    "h": "3600",
    "d": "86400",
}
# Limits of bytes (per second), of seconds (ten thousand years) and of a latency: sums of such numbers stay finite.
_FASTEST, _LONGEST_S, _LONGEST_LATENCY_S = 1e18, 3.2e11, 3600.0
_SHOWN_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*"


def parse_bandwidth(text: str, where: str = "--bandwidth") -> float:
    """Return bytes per second for text such as ``10Gbit``, ``100 Mbit/s``, ``1.2GB/s``.

    ``bit`` or a lower-case ``b`` is bits, ``B`` is bytes. Raises InputError, named ``where``, for anything else and for
    a rate outside of 1 B/s to 1e18 B/s.

    >>> parse_bandwidth("10Gbit")
    1250000000.0
    """
    match = re.fullmatch(_NUMBER + r"([kKmMgGtT]i?)?(bits?|b|B|bytes?)(?:/s|ps)?\s*", text)
    if match is None:
        raise InputError(where, f"{text!r} is not a bandwidth", "write a number with a unit, such as 10Gbit or 1.2GB/s")
    value, prefix, unit = match.groups()
    units_per_byte = 8 if unit in ("bit", "bits", "b") else 1
    rate = float(value) * _PREFIX[(prefix or "").lower()] / units_per_byte
    if not (1 <= rate <= _FASTEST):
        raise InputError(where, f"{text!r} is not a usable bandwidth", "it must be between 1 B/s and 1e18 B/s")
    return rate


def parse_bytes(text: str, where: str) -> float:
    """Return bytes for a size of memory such as ``40GiB``, ``512 MiB`` or ``24GB``.

    Raises InputError, named ``where``, for anything else and for a size outside of 1 B to 1e18 B.

    >>> parse_bytes("40GiB", "--checkpointing")
    42949672960.0
    """
    match = re.fullmatch(_NUMBER + r"([kKmMgGtT]i?)?B\s*", text)
    size = float(match[1]) * _PREFIX[(match[2] or "").lower()] if match else math.nan
    if not (1 <= size <= _FASTEST):
        raise InputError(where, f"{text!r} is not a size of memory", "write a number with a unit, such as 40GiB")
    return size


def parse_share(text: str) -> float:
    """Return the number that ``5%`` or ``0.05`` stands for, NaN for any other text; the range is left to the caller.

    >>> parse_share("5%"), parse_share("0.02")
    (0.05, 0.02)
    """
    number = text.strip()
    try:
        return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        return math.nan


def parse_duration(text: str, where: str) -> float:
    """Return seconds for text such as ``50us``, ``1.5ms``, ``60s``, ``2h``, ``3d``; a bare number is seconds.

    Raises InputError, named ``where``, for anything else and for more than ten thousand years.

    >>> parse_duration("50us", "--repair")
    5e-05
    """
    match = re.fullmatch(_NUMBER + r"(ns|us|µs|ms|s|min|m|h|d)?\s*", text)
    if match is None:
        raise InputError(where, f"{text!r} is not a duration", "write a number with a unit, such as 50us, 1.5ms or 2h")
    # Decimal, so that 50us is exactly the float 5e-05.
    seconds = float(Decimal(match.group(1)) * Decimal(_TIME[match.group(2) or "s"]))
    if not seconds <= _LONGEST_S:
        raise InputError(where, f"{text!r} is longer than ten thousand years", "write a duration such as 1.5h")
    return seconds


def parse_latency(text: str, where: str = "--latency") -> float:
    """Return seconds for a latency such as ``10us``.

    Raises InputError, named ``where``, for a number other than 0 without a unit (as seconds it would hardly be meant),
    for more than an hour, and for what is no duration.

    >>> parse_latency("10us")
    1e-05
    """
    seconds = parse_duration(text, where)
    if seconds and text.strip()[-1:].isdigit():
        raise InputError(where, f"{text!r} has no unit", f"write {text.strip()}us or {text.strip()}ms")
    if seconds > _LONGEST_LATENCY_S:
        raise InputError(where, f"{text!r} is no latency of a network", "write microseconds, such as 50us")
    return seconds


def show_seconds(seconds: float | None) -> str:
    """Return a duration as text: three significant digits, from 1,000 s on whole seconds; "-" for None and NaN.

    >>> show_seconds(0.00153), show_seconds(0.9996), show_seconds(86400.0), show_seconds(None)
    ('1.53 ms', '1 s', '86,400 s', '-')
    """
    if seconds is None or math.isnan(seconds):
        return "-"
    if math.isinf(seconds):
        return "inf"
    rounded = float(f"{seconds:.3g}")  # the unit is that of the rounded value, so that 999.6 us are 1 ms
    if abs(rounded) >= 1000:
        return f"{seconds:,.0f} s" if abs(seconds) < 1e12 else f"{rounded:g} s"  # a row of 13 digits is unreadable
    for unit, scale in _SHOWN_UNITS.items():
        if abs(rounded) >= scale:
            return f"{rounded / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds:.2e} s"


def show_hours(hours: float) -> str:
    """Return a duration in hours as text, in days from 48 hours on, in minutes below one hour, in seconds below 2 minutes.

    >>> show_hours(0.25), show_hours(19.04), show_hours(75.0)
    ('15 min', '19 h', '3.12 days')
    """
    if hours >= 48:
        return f"{hours / 24:.3g} days"
    if hours >= 1:
        return f"{hours:.3g} h"
    return f"{hours * 60:.3g} min" if hours >= 1 / 30 else show_seconds(hours * 3600)


def show_money(amount: float) -> str:
    """Return an amount of US dollars, at least 0, as text, to the cent; one below a cent with two significant digits.

    >>> show_money(0.8912), show_money(12345.6), show_money(0.00321)
    ('$0.89', '$12,345.60', '$0.0032')
    """
    return f"${amount:,.2f}" if amount >= 0.01 or amount == 0 else f"${amount:.2g}"


def show_span(low_s: float, high_s: float) -> str:
    """Return a range of durations as text: in the higher end's unit if the lower end is at least a tenth of that unit.

    >>> show_span(0.00583, 0.021), show_span(0.5, 75.0), show_span(0.00002, 0.002)
    ('5.83..21 ms', '0.5..75 s', '20 us..2 ms')
    """
    low, high = show_seconds(low_s), show_seconds(high_s)
    scale = _SHOWN_UNITS.get(high.rpartition(" ")[2], math.nan)  # "inf" has no unit; nothing is at least nan
    return f"{low_s / scale:.3g}..{high}" if low_s >= 0.1 * scale else f"{low}..{high}"


def show_rate(per_s: float) -> str:
    """Return a rate as text: four significant digits, from 1,000 on with commas.

    >>> show_rate(38324.6), show_rate(2.658e7), show_rate(12.345)
    ('38,320', '26,580,000', '12.35')
    """
    return f"{float(f'{per_s:.4g}'):,.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def faster_than(gain: float) -> str:
    """Return in words a gain of speed given as a share (0.25: a quarter more), to be followed by what is compared with.

    >>> faster_than(0.25), faster_than(-0.1), faster_than(2.0)
    ('25% faster than', '10% slower than', '3 times as fast as')
    """
    if gain >= 1:
        return f"{gain + 1:.3g} times as fast as"
    return f"{abs(gain):.0%} {'faster' if gain >= 0 else 'slower'} than"


def show_bytes(size_bytes: float | None) -> str:
    """Return a size as text in binary units, with one decimal digit from KiB on; "-" for None and NaN.

    >>> show_bytes(1536), show_bytes(102_230_128)
    ('1.5 KiB', '97.5 MiB')
    """
    if size_bytes is None or math.isnan(size_bytes):
        return "-"
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, to which an s is added for any count but 1.

    >>> counted(1, "barrier"), counted(2000, "barrier")
    ('1 barrier', '2,000 barriers')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
