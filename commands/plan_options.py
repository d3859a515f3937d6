"""What the options of ``ddltool plan`` say: which of them a kind of plan reads, and how their texts are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from ddltool.analyzers.job.planning.candidates import STRATEGIES
from ddltool.analyzers.job.planning.failures import Failures
from ddltool.analyzers.job.planning.numerics import combinations
from ddltool.commands.options import integers, number, share
from ddltool.commands.verbs import is_given
from ddltool.decision import Objective
from ddltool.errors import InputError, known
from ddltool.units import parse_duration

# Parameters by what reads them: one that nothing reads in a plan of that kind is refused (:func:`demand_part`).
# Of a job: those that every strategy reads.
BY_ALL = {
    "job", "strategy", "graph", "time_limit_s", "devices_file", "allow_code", "output", "seed", "as_json", "price",
}  # fmt: skip
_BARRIERS = {"lookahead", "max_gap"}
# What a job without a file reads beside its devices.
OF_MODEL = {
    "devices", "nodes", "batch_size", "precision", "sequence_length", "optimizer", "compile", "channels_last", "offload",
    "attention", "lora", "load_in_4bit", "link", "nic", "save_job",
}  # fmt: skip
# Parameters that a saved job.yaml makes superfluous: it holds them, or they do not change the answer.
SAVED = {*OF_MODEL, *BY_ALL, "bandwidth"} - {"strategy", "graph"}
# What says how devices fail; all need mtbf_s.
_FAILURES = {
    "mtbf_s", "checkpoint_s", "storage", "checkpoint_copy_s", "memory_checkpoint", "restart_s", "repair_s", "spares",
    "notice_s",
}  # fmt: skip
# What says how long the whole run is, and what limits it.
OF_RUN = {"tokens", "samples", "epochs", "deadline_s", "budget", *_FAILURES}
_MOST_SAMPLES = 1e30
# Defaults: seconds of a checkpoint; seconds for which a failed device is away, where spares are asked for.
_CHECKPOINT_S, _AWAY_S = 60.0, 14_400.0
_AUTO = {"objective", "telemetry", "bandwidth", "latency", "nccl_tests", "compress", *OF_RUN}
# The options that a strategy reads beside those.
BY_STRATEGY = {
    "auto": {*_AUTO, "top_k", *_BARRIERS},
    "bsp": _AUTO,
    "lb-bsp": _AUTO,
    "elastic-bsp": {*_AUTO, *_BARRIERS},
    "est": {"top_k", "prefer", "together"},
}
# What both plans read that are not of a job: of a recorded step, and of islands on a slow link.
_OF_BOTH = {"job", "devices", "link", "nic", "bandwidth", "latency", "nccl_tests", "devices_file", "output", "as_json"}
# What the plan of a recorded step reads, and what one that is to be recorded reads beside.
OF_STEP = {*_OF_BOTH, "price", "tokens", "samples", "epochs", "deadline_s", "budget"}
OF_COMMAND = {"vary", "limit", "keep_files"}
# What says how islands meet, and what their plan reads.
OUTER = {"link_between", "outer_every", "fragments", "overlap", "outer_bits"}
OF_ISLANDS = {*_OF_BOTH, *OF_MODEL, *OUTER, "time_limit_s", "seed"} - {"nodes", "save_job", "offload", "attention"}
# Numbers of inner steps between outer steps that are tried by default.
EVERY = (1, 8, 64, 500)
# What the plan of several jobs reads.
TOGETHER = {"job", "strategy", "together", "share", "devices_file", "allow_code", "time_limit_s", "seed", "as_json"}


def read_strategy(text: str, option: str) -> str:
    """Return the strategy that the text names. Raises InputError, naming ``option``, for any other text."""
    if text in get_args(Objective):
        # "plan --strategy cheapest" is a likely mistake.
        raise InputError(option, f"{text} is an objective", f"give --objective {text}")
    return known(option, text, ("auto", *STRATEGIES))


def read_names(text: str, option: str) -> tuple[str, ...]:
    """Return the names of objectives in a text such as ``throughput,devices``, which are not checked here.

    Raises InputError, naming ``option``, if there are none.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise InputError(option, f"{text!r} names no objective", "for example throughput,devices,price")
    return names


def total_samples(samples: float | None, epochs: float | None, tokens: float | None) -> float | None:
    """Return the samples of the whole run; None: its length is not said, or said in tokens.

    ``samples``: of the whole run, or where ``epochs`` are given of one epoch. ``tokens``: of the whole run. None: not given.
    Raises InputError for samples beside tokens, epochs without samples, and a run of none or too many.
    """
    if samples is not None and tokens is not None:
        raise InputError("samples", "has no part beside --tokens", "give one of the two")
    if samples is None:
        if epochs is not None:
            raise InputError("epochs", "of how many samples is not said", "give --samples N: those of an epoch")
        return None
    total = samples if epochs is None else samples * epochs
    if not 0 < total <= _MOST_SAMPLES:
        raise InputError("epochs", f"makes {total:.3g} samples", f"give a run of up to {_MOST_SAMPLES:.0e}")
    return total


def read_amount(text: str, option: str) -> float:
    """Return the number in a text such as ``10B`` (billion) or ``1.2M`` (million).

    Raises InputError, naming ``option``, for other texts, and unless the number is above 0.
    """
    match = re.fullmatch(r"\s*(-?[0-9]{1,18}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)\s*([kKMBGT]?)\s*", text)
    if match is None:
        raise InputError(option, f"{text!r} is no number of them", "write 1281167, 1.2M or 10B")
    value, suffix = float(match[1]), match[2]
    if not value > 0:
        raise InputError(option, f"is {text.strip()}", "give a number above 0: 1281167, 1.2M or 10B")
    scale = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    return value * scale[suffix]


def each_part(read: Callable[[str, str], Any]) -> Callable[[str, str], str]:
    """Return a reader of (text, option) for a comma-separated list; ``read`` reads each part.

    It returns a text again, as the parameter is a text in Python too: the read parts, each once, with commas.
    """

    def read_all(text: str, option: str) -> str:
        """Return the read parts of the text with commas. Raises InputError as the reader of a part does."""
        return ",".join(dict.fromkeys(str(read(part.strip(), option)) for part in text.split(",")))

    return read_all


def _lora_ranks(given: int | str | None, option: str) -> list[int | None]:
    """Return the ranks of LoRA adapters that a text such as ``none,16`` names, each once: [None, 16].

    None in the list means no adapters: all parameters are trained. ``given`` may also be one rank, or None, which stands for
    "none". Raises InputError, naming ``option``, for anything else.
    """
    parts = [part.strip() for part in str(given or "none").split(",")]
    read_rank = number(1, 4096, whole=True)
    ranks = [None if part in ("none", "full") else int(read_rank(part, option)) for part in parts]
    return list(dict.fromkeys(ranks))


def named_numerics(
    precision: str, optimizer: str | None, lora: int | str | None, load_in_4bit: bool = False
) -> list[dict[str, Any]]:
    """Return every combination of the named values as fields of a job: ``precision``, ``optimizer`` and ``lora`` (a rank).

    Each of the three is a text that may name several values, with commas; ``optimizer`` and ``lora`` may be None. In the
    result, a value that the caller did not give is None, for which the job's default holds. ``load_in_4bit``: whether jobs with
    a rank have that field. Raises InputError if it is on and there is no rank.
    """
    ranks = _lora_ranks(lora, "--lora")
    if load_in_4bit and ranks == [None]:
        raise InputError("--load-in-4bit", "packs the weights that LoRA freezes, and none is", "give --lora 16, too")
    found = combinations(
        precision.split(",") if is_given("precision") else [None],
        [None] if optimizer is None else optimizer.split(","),
        ranks,
    )
    return [{**each, "load_in_4bit": True} if load_in_4bit and each["lora"] else each for each in found]


def read_ranks(text: str, option: str) -> str:
    """Return the ranks in a text such as ``full,16`` as ``none,16``. Raises InputError, naming ``option``, for others."""
    return ",".join("none" if rank is None else str(rank) for rank in _lora_ranks(text, option))


# Reader of a text such as ``1,8,64``: after how many steps within an island all islands synchronise.
read_every = partial(integers, most=10_000_000)


def read_memory_checkpoint(text: str, option: str) -> tuple[float, float]:
    """Return (seconds of a checkpoint in a neighbour's memory, share of failures that it outlasts) for ``5s,90%``.

    Raises InputError, naming ``option``, for any other text.
    """
    time_text, comma, share_text = text.partition(",")
    if not comma:
        raise InputError(option, f"is {text!r}", "write its time and the share of failures that it outlasts: 5s,90%")
    return parse_duration(time_text, option), share(share_text, option)


def failures_of(
    mtbf_s: float | None,
    checkpoint_s: float | None,
    storage: float | None,
    copy_s: float | None,
    memory: tuple[float, float],
    **others: Any,
) -> Failures | None:
    """Return the failures that the options say; None without ``mtbf_s``: nothing fails.

    Args:
        mtbf_s: mean seconds between failures of one device.
        checkpoint_s: seconds of writing a checkpoint; None: they follow from ``storage``, or are 60.
        storage: bytes per second at which checkpoints are written; the planner, which knows their size, applies it.
        copy_s: seconds for which training stops while a checkpoint is copied and then written beside it; None: training
            stops for the whole write.
        memory: see :func:`read_memory_checkpoint`.
        others: restart_s, repair_s, spares and notice_s, as :class:`Failures` has them.

    Raises InputError for options that have no effect or exclude each other.
    """
    if mtbf_s is None:
        for name in sorted(_FAILURES):
            if is_given(name):
                raise InputError(name, "needs --mtbf", "say how often a device fails: --mtbf 100h")
        return None
    if checkpoint_s is not None and storage is not None:
        raise InputError("storage", "has no part beside --checkpoint-write, which is its time", "give one of the two")
    if others["spares"] and not others["repair_s"]:  # where another device is there at once, spares have no part
        if is_given("repair_s"):
            raise InputError("spares", "have no part where failed devices are back at once", "give --repair 4h, or so")
        others["repair_s"] = _AWAY_S
    write_s = _CHECKPOINT_S if checkpoint_s is None else checkpoint_s
    if copy_s is None:  # training stops for the whole write
        stop_s, beside_s = write_s, 0.0
    else:  # training stops for a copy, which is then written beside it
        stop_s, beside_s = copy_s, write_s
    if not stop_s:
        raise InputError("checkpoint_s" if copy_s is None else "checkpoint_copy_s", "is 0 s", "give a time above 0")
    memory_s, outlasts = memory
    return Failures(
        mtbf_s=mtbf_s, checkpoint_s=stop_s, write_s=beside_s, memory_s=memory_s, memory_share=outlasts, **others
    )
