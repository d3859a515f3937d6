"""Whether an optimizer's saved state fits the optimizer that is to continue with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ddltool.errors import InputError

_BUILD = "build the optimizer that was saved"
# What a learning-rate scheduler changes as it goes: there only the value that it started from is the user's choice.
_SCHEDULED = frozenset({"lr", "momentum", "betas"})


def demand_same_optimizer(
    path: str | os.PathLike[str], saved: Mapping[str, Any], saved_class: str | None, optimizer: torch.optim.Optimizer
) -> str | None:
    """Check a saved state against ``optimizer`` before anything is loaded; return what is to be told, or None.

    Other values of an option (a learning rate, say) are told: the saved ones are continued with. Raises InputError for
    another class of optimizer (``saved_class``; None: not recorded), other parameter groups or other options.
    """
    where = f"{os.fspath(path)}:optimizer"
    here_class = type(optimizer).__name__
    if saved_class not in (None, here_class):
        raise InputError(where, f"is {saved_class} there and {here_class} here", _BUILD)
    there, here = saved["param_groups"], optimizer.state_dict()["param_groups"]
    if len(there) != len(here):
        raise InputError(where, f"has {len(there)} parameter groups there and {len(here)} here", _BUILD)
    told = []
    for number, (one, other) in enumerate(zip(there, here, strict=True)):
        group = f"{where}:group {number}"
        if len(one["params"]) != len(other["params"]):
            problem = f"has {len(one['params'])} parameters there and {len(other['params'])} here"
            raise InputError(group, problem, _BUILD)
        # A scheduler adds names of its own, such as initial_lr, when it is made.
        if lacking := sorted(other.keys() - one.keys() - {"initial_lr"}):
            raise InputError(group, f"has no {lacking[0]} there", _BUILD)
        compared = other.keys() & one.keys() - {"params"}
        if "initial_lr" in one:
            compared -= _SCHEDULED
        told += [
            f"{name} of group {number} is {one[name]} there and {other[name]} here"
            for name in sorted(compared)
            if one[name] != other[name]
        ]
    return f"{where}: {'; '.join(told)}; the saved values are continued with" if told else None
