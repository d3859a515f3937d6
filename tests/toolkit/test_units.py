"""Quantities with units."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool import errors, graph, units
from ddltool.errors import InputError
from ddltool.units import parse_bandwidth, parse_duration, show_bytes, show_seconds


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10Gbit", 1.25e9),
        ("100 Mbit/s", 12.5e6),
        ("1.2GB/s", 1.2e9),
        ("8bit", 1.0),
        ("1GiB/s", 2.0**30),
        ("1e3Mbps", 125e6),
    ],
)
def test_bandwidth(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["", "10", "fast", "0Gbit", "-1Gbit", "1e999Gbit", "nanGbit", "10 Gbit 5"])
def test_bad_bandwidth(text: str) -> None:
    with pytest.raises(InputError, match="--bandwidth: .* is not a"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50us", 5e-5), ("1.5 ms", 1.5e-3), ("0", 0.0), ("2h", 7200.0), ("1min", 60.0)]
)
def test_duration(text: str, seconds: float) -> None:
    assert parse_duration(text, "--repair") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1e999s", "nan"])
def test_bad_duration(text: str) -> None:
    with pytest.raises(InputError, match="--repair: .* (not|longer) "):
        parse_duration(text, "--repair")


def test_shown() -> None:
    assert [show_seconds(value) for value in (0.0, 2e-9, 0.5, 12.34, 5000.0, float("inf"))] == [
        "0 s", "2 ns", "500 ms", "12.3 s", "5,000 s", "inf",
    ]  # fmt: skip
    assert [show_bytes(value) for value in (0, 2**20, 3 * 2**40, None)] == ["0 B", "1.0 MiB", "3.0 TiB", "-"]


@given(st.floats(1e-6, 86_400.0) | st.sampled_from([9.996e-7, 999.6e-6, 0.9996, 999.5, 999.6, 86_399.6]))
def test_shown_seconds_have_no_exponent_and_three_digits(seconds: float) -> None:
    number, unit = show_seconds(seconds).split()
    value = float(number.replace(",", "")) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    assert "e" not in number
    last_digit = min(10.0 ** (math.floor(math.log10(seconds)) - 2), 1.0)
    assert abs(value - seconds) <= last_digit / 2 * (1 + 1e-9)
    assert unit == "s" or float(number) < 1000


@pytest.mark.parametrize("module", [errors, graph, units])
def test_examples(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0
