"""The texts of options as numbers: what is read, and which option an error names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.commands.options import as_options, budget, integers, number, share
from ddltool.errors import InputError
from ddltool.units import parse_bytes
from tests.conftest import Result


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_integers_come_sorted_and_once(numbers: list[int]) -> None:
    text = ",".join(map(str, numbers))
    assert integers(text, "--replicas") == tuple(sorted(set(numbers)))


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (integers, "1,x", "'1,x' is not a list of whole numbers; write for example 1,2,4"),
        (integers, "0", "0 is below 1; write whole numbers >= 1"),
        (integers, ",".join(map(str, range(1, 1002))), "holds 1001 numbers; give at most 1000"),
        (share, "100%", "'100%' is not a share"),
        (budget, "0s", "'0s' is not a usable time"),
        (budget, "721h", "'721h' is not a usable time"),
        (parse_bytes, "0GiB", "'0GiB' is not a size"),
        (parse_bytes, "much", "'much' is not a size"),
        *(
            (number(0.5, 1e9), text, message)
            for text, message in (
                ("nan", "is nan; give a number"),
                ("many", "'many' is no number; give a number"),
                ("inf", "is inf; give a number from 0.5 to 1000000000"),
                ("0.4999", "is 0.4999; give a number from 0.5 to 1000000000"),
            )
        ),
        (number(1), "-inf", "is -inf; give a number of at least 1"),
    ],
)
def test_errors_name_the_option_and_the_text(read: object, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(text, "--option")  # type: ignore[operator]
    assert str(caught.value).startswith(f"--option: {message}")


def test_an_error_names_the_option_and_keeps_what_was_added() -> None:
    @as_options({"restart delay": "--restart-delay"})
    def fail(where: str, added: str = "") -> None:
        error = InputError(where, "is -1", "at least 0")
        error.args = (f"{error}{added}",)
        raise error

    for where, option in (("restart delay", "--restart-delay"), ("delay", "delay")):
        with pytest.raises(InputError, match=f"^{option}: is -1; at least 0; 3 rows are kept$") as caught:
            fail(where, "; 3 rows are kept")
        assert caught.value.where == option


def test_sizes_and_shares_in_their_units() -> None:
    assert number(0.5)("0.5", "--horizon") == 0.5
    assert parse_bytes("2GiB", "--memory") == 2 * 2**30
    assert parse_bytes("500 MB", "--memory") == 500e6
    assert share("5%", "--precision") == share("0.05", "--precision") == pytest.approx(0.05)
    assert budget("5min", "--budget") == 300.0


@pytest.mark.parametrize(
    ("command", "option"), [(("report", "none.json"), "--noise-scale"), (("trace", "zoo:mlp"), "--time-limit")]
)
def test_commands_say_that_nan_is_no_number(cli: Callable[..., Result], command: tuple[str, ...], option: str) -> None:
    refused = cli(*command, option, "nan")
    assert refused.code == 2
    assert refused.error_line == f"{option}: is nan; give a number"
