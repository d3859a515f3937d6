"""The scheduling policies by their names. A new one is a file with a class like :class:`Policy`, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ddltool.analyzers.scheduling.cluster import MIXED_POLICIES
from ddltool.analyzers.scheduling.easyscale import EasyScale
from ddltool.analyzers.scheduling.gangs import Fifo, Srtf, Tiresias
from ddltool.analyzers.scheduling.optimus import Optimus
from ddltool.analyzers.scheduling.ours import Ours
from ddltool.analyzers.scheduling.pollux import Pollux
from ddltool.analyzers.scheduling.sia import Sia
from ddltool.analyzers.scheduling.simulator import Policy
from ddltool.errors import InputError, did_you_mean

POLICIES: Mapping[str, Callable[..., Policy]] = {
    "fifo": lambda **_: Fifo(),
    "tiresias": lambda **_: Tiresias(),
    "optimus": lambda **_: Optimus(),
    "pollux": Pollux,
    "srtf": lambda **_: Srtf(),
    "easyscale-homo": lambda **_: EasyScale(heterogeneous=False),
    "easyscale-heter": lambda **_: EasyScale(),
    "sia": lambda delay_s, **_: Sia(delay_s=delay_s),
    "ours": lambda delay_s, seed, **_: Ours(delay_s=delay_s, seed=seed),
}
"""What makes each policy: given ``power`` (of Pollux's fitness), ``delay_s`` (what a restart costs) and ``seed``."""


def policies(
    names: str, power: float = -1.0, delay_s: float = 30.0, seed: int = 0, *, mixed: bool = False
) -> dict[str, Callable[[], Policy]]:
    """Return what makes each policy of a comma-separated list, in its order.

    ``all`` leaves those out that know one GPU type only where the cluster is ``mixed``. Raises InputError for unknown
    names.
    """
    everything = [name for name in POLICIES if name in MIXED_POLICIES or not mixed]
    wanted = everything if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in POLICIES:
            raise InputError("--policy", f"unknown policy {name!r}", did_you_mean(name, [*POLICIES, "all"]))
    if not wanted:
        raise InputError("--policy", "names no policy", did_you_mean(names, POLICIES))
    Pollux(power=power)  # refuses a power before anything is replayed, in a sweep too
    return {name: partial(POLICIES[name], power=power, delay_s=delay_s, seed=seed) for name in wanted}
