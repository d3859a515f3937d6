"""Checks of what a script gives to ``balance``: one line that names the argument."""

from __future__ import annotations

import operator

from ddltool.errors import InputError

MOST_SAMPLES = 10**12


def whole_samples(name: str, value: object) -> int:
    """Return a number of samples. Raises InputError for anything but a whole number from 1 to 10^12."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if isinstance(value, bool) or not 1 <= number <= MOST_SAMPLES:
        raise InputError(name, f"{value!r} is no number of samples", f"give whole numbers from 1 to {MOST_SAMPLES}")
    return number


def check_options(options: object) -> None:
    """Raise InputError naming the option that is not usable."""
    choices: dict[str, tuple[object, ...]] = {
        "cluster": ("cpu", "gpu"),
        "compress": (None, "bf16"),
        "background": (None, True, False),
        "enabled": (True, False),
    }
    for name, known in choices.items():
        if (value := getattr(options, name)) not in known:
            raise InputError(name, f"is {value!r}", " or ".join(map(str, known)))
    spans = {"tolerance": (0.0, 1.0, "a share from 0 to 1"), "timeout_s": (0.001, 1e6, "seconds from 0.001 to 1e6")}
    for name, (low, high, text) in spans.items():
        value = getattr(options, name)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            raise InputError(name, f"is {value!r}", f"give {text}")
