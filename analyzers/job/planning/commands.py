"""Plans of a training command: its options are varied, and each combination is recorded and predicted.

Start at :func:`plan_command`. A knob is an option of the command with values to try.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product

from ddltool.analyzers.job.planning.job_inputs import Offered
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import CostModel
from ddltool.analyzers.step.costs.recorded import predict_recorded
from ddltool.analyzers.step.recording.command import assumed, record, words_of
from ddltool.analyzers.step.recording.launchers import Launched, launched
from ddltool.device import DEVICES_PER_NODE, DeviceTable
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.graph_results import CommandPlan, PredictedRow, TriedCommand
from ddltool.stages import Stage, Tell

MOST = 64
"""Largest number of combinations of values that are tried."""
_RECORDING_BYTES = 2 * 2**30
"""Memory of this machine that is allowed for each recording at the same time."""
# Launchers' options for the number of processes on a node, in the form of Knob.key.
_PROCESSES = {"nproc_per_node", "num_processes"}
_NUMBER = re.compile(r"-?[0-9.]+(e-?[0-9]+)?")
Costs = Callable[["NodeOfDevices"], tuple[CostModel, Fabric]]
"""Node -> cost model of its devices, and their network."""


@dataclass(frozen=True, slots=True)
class Knob:
    """An option of a command and the values to try: ``--batch-size 4,8``, ``--batch-size=4,8`` or ``batch_size=4,8``."""

    name: str
    """As the user wrote it, with its hyphens."""
    values: tuple[str, ...]
    """The values to try, without repeats."""
    is_joined: bool
    """Whether name and value are one word, joined by ``=``."""

    @property
    def key(self) -> str:
        """Return the name in the form in which options are compared: ``--batch-size`` as ``batch_size``."""
        return _key(self.name)

    def value_in(self, words: Sequence[str]) -> str | None:
        """Return the option's value in the command ``words``, "" for an option without one; None where it is not there."""
        place = self._place(words)
        if place is None:
            return None
        _, equals, joined_value = words[place].partition("=")
        if equals:
            return joined_value
        return words[place + 1] if _has_value(words, place) else ""

    def set_in(self, words: Sequence[str], value: str) -> list[str]:
        """Return the command ``words`` with the option set to ``value``.

        The option keeps its place and spelling in the command; it is added at the end if it is not there.
        """
        place = self._place(words)
        if place is None:
            return [*words, f"{self.name}={value}"] if self.is_joined else [*words, self.name, value]
        name, equals, _ = words[place].partition("=")
        if equals:
            return [*words[:place], f"{name}={value}", *words[place + 1 :]]
        following = place + 2 if _has_value(words, place) else place + 1  # behind the old value, if there is one
        return [*words[: place + 1], value, *words[following:]]

    def _place(self, words: Sequence[str]) -> int | None:
        """Return the index in ``words`` of the option's last occurrence, which overrules earlier ones; None: there is none."""
        named = [
            place
            for place, word in enumerate(words)
            if _key(word.partition("=")[0]) == self.key and (word.startswith("-") or "=" in word)
        ]
        return named[-1] if named else None


def _key(name: str) -> str:
    """Return an option's name without leading hyphens, with underscores for the others."""
    return name.lstrip("-").replace("-", "_")


def _has_value(words: Sequence[str], place: int) -> bool:
    """Return whether the word after the option at ``place`` is its value: it starts without a hyphen or is a number."""
    following = words[place + 1 : place + 2]
    return bool(following) and (not following[0].startswith("-") or _NUMBER.fullmatch(following[0]) is not None)


def knobs_of(texts: Sequence[str]) -> list[Knob]:
    """Return the knobs that texts such as ``--batch-size 4,8,16`` describe.

    Raises InputError for a text without values, an option that is given twice, and more than :data:`MOST` combinations.
    """
    knobs: list[Knob] = []
    for text in texts:
        match = re.fullmatch(r"\s*([^\s=,]+)(\s*=\s*|\s+|$)(.*?)\s*", text, re.DOTALL)
        values = [value.strip() for value in match[3].split(",")] if match is not None else []
        if match is None or not match[1].lstrip("-") or not all(values):
            raise InputError("--vary", f"{text!r} has no values", 'write "--batch-size 4,8,16", or "batch_size=4,8,16"')
        knob = Knob(match[1], tuple(dict.fromkeys(values)), "=" in match[2])
        if any(knob.key == other.key for other in knobs):
            raise InputError("--vary", f"gives {knob.name} twice", "name all its values once")
        knobs.append(knob)
    count = math.prod(len(knob.values) for knob in knobs)
    if count > MOST:
        raise InputError("--vary", f"makes {count:,} combinations", f"try at most {MOST}")
    return knobs


@dataclass(frozen=True, slots=True)
class NodeOfDevices:
    """The devices of one node: the name of their type in the device table, and their number."""

    device: str
    count: int


@dataclass(frozen=True, slots=True)
class _Variant:
    """A command to try: the user's own, or with other values of the knobs."""

    words: tuple[str, ...]
    values: Mapping[str, str]
    """Knob's name -> value in this command."""
    is_given: bool
    """Whether it is the user's own command."""

    def tried(self, node: NodeOfDevices, row: PredictedRow | None = None, failure: str | None = None) -> TriedCommand:
        """Return the record of this command on ``node``: its predicted ``row``, or the text of its ``failure``."""
        return TriedCommand(
            command=shlex.join(self.words),
            values=dict(self.values),
            given=self.is_given,
            device=node.device,
            devices_per_node=node.count,
            row=row,
            failure=failure,
        )


def plan_command(
    source: str | Sequence[str],
    devices: Sequence[Offered],
    knobs: Sequence[Knob],
    *,
    table: DeviceTable,
    costs: Costs,
    limit_s: float,
    keep_files: bool,
    tell: Tell,
    stage: Stage,
) -> CommandPlan:
    """Return the predicted steps of a command and of its variants on each type of devices, the fastest that fits first.

    To record a command is to run it without GPUs and trace a step of its training. Each variant is recorded once per number of
    devices on a node, in a process of its own; as many at once as there are cores and memory. On Ctrl-C the running ones are
    ended.

    Args:
        source: the command, as one text or as words.
        devices: types to predict for, with the number on a node; the command's launcher starts a process on each device.
        knobs: options to vary; the command as it is given is always tried.
        table: the known device types.
        costs: times the steps on a node's devices.
        limit_s: seconds after which a recording is ended, which makes its variant fail.
        keep_files: whether files that the script writes are kept.
        tell: takes remarks for the user.
        stage: shows the progress of the recordings.

    Raises InputError for a command that cannot be read, for devices that do not agree with its launcher, and where no variant
    can be recorded.
    """
    words = words_of(source)
    varies_processes = any(knob.key in _PROCESSES for knob in knobs)
    commands: dict[NodeOfDevices, list[str]] = {}
    remarks: dict[str, None] = {}  # an ordered set: several types may cause the same remark
    for offer in devices:
        node, on_node = _node_and_command(words, offer, table, remarks, may_idle=varies_processes)
        commands[node] = on_node
    for line in remarks:
        tell(line)
    # (words of a command, devices on a node) -> the nodes and variants to predict from this one recording
    recordings: dict[tuple[tuple[str, ...], int], list[tuple[NodeOfDevices, _Variant]]] = {}
    for node, on_node in commands.items():
        for variant in _variants(on_node, knobs):
            recordings.setdefault((variant.words, node.count), []).append((node, variant))
    at_once = max(1, min(os.cpu_count() or 1, len(recordings), _memory_bytes() // _RECORDING_BYTES))
    ended = threading.Event()
    tried: list[TriedCommand] = []
    assumptions: list[str] = []

    def run(recording: tuple[tuple[str, ...], int]) -> list[TriedCommand]:
        """Record one command and predict its step on each of its nodes; return the predictions, or records of its failure."""
        variant_words, count = recording
        wanted = recordings[recording]
        try:
            if launched(variant_words, count).per_node > count:
                raise InputError("", f"starts more processes than a node's {count}", "leave that value out")
            graph = record(
                variant_words, table.device(wanted[0][0].device), gpus_per_node=count, limit_s=limit_s, keep_files=keep_files,
                shows=len(recordings) == 1, ended=ended,
            )  # fmt: skip
            if line := assumed(graph):
                assumptions.append(line)
            return [variant.tried(node, predicted_row(graph, costs(node))) for node, variant in wanted]
        except InputError as error:
            failure = "; ".join(filter(None, (error.problem, error.remedy)))
            return [variant.tried(node, failure=failure) for node, variant in wanted]

    title = f"recording {len(recordings)} commands" if len(recordings) > 1 else f"recording {shlex.join(words)}"
    with stage(title, len(recordings)) as advance, ThreadPoolExecutor(at_once) as pool:
        try:
            for done, future in enumerate(as_completed([pool.submit(run, each) for each in recordings]), 1):
                tried += future.result()
                advance(done)
        finally:  # on Ctrl-C, end the recordings that run and do not begin the others
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
    if all(one.row is None for one in tried):
        first = next(one for one in tried if one.given)
        problem, _, remedy = (first.failure or "").partition("; ")
        raise InputError(first.command, problem, remedy)
    for line in sorted(assumptions, key=len)[-1:]:  # the others say much the same
        tell(line)
    return _ranked(shlex.join(words), knobs, tried)


def plan_recorded(graph: Graph, devices: Sequence[Offered], *, table: DeviceTable, costs: Costs) -> CommandPlan:
    """Return the predicted steps of a recorded graph on each type of devices, the fastest that fits first.

    The number of processes stays that of the recording; ``graph.recorded`` must not be None. A device type without a number has
    eight devices on a node, or as many as there are processes where these are fewer. ``table``: the known device types;
    ``costs``: returns the cost model and the network by which steps on a node are timed.
    """
    assert graph.recorded is not None
    given = _Variant(tuple(shlex.split(graph.name)), {}, is_given=True)  # the name is the recorded command line
    per_node = min(graph.recorded.world_size, DEVICES_PER_NODE)
    nodes = dict.fromkeys(
        NodeOfDevices(table.gpu(one.type, "--devices").name, one.count or per_node) for one in devices
    )
    return _ranked(graph.name, (), [given.tried(node, predicted_row(graph, costs(node))) for node in nodes])


def predicted_row(graph: Graph, cost: tuple[CostModel, Fabric]) -> PredictedRow:
    """Return the predicted figures of a recorded step; ``cost``: the devices' cost model, and their network."""
    return predict_recorded(graph, [cost], graph.name).rows[0]


def _node_and_command(
    words: list[str], offer: Offered, table: DeviceTable, remarks: dict[str, None], *, may_idle: bool
) -> tuple[NodeOfDevices, list[str]]:
    """Return (node that ``offer`` means, words of the command to run on it).

    The words are those of the user's command, with the number of processes added if torchrun does not say it. Remarks for the
    user are added to ``remarks`` as keys. ``may_idle``: whether the command may start fewer processes than there are devices,
    because their number is a knob. Raises InputError where offer and command disagree on the number.
    """
    device = table.gpu(offer.type, "--devices").name
    launch = launched(words, offer.count or DEVICES_PER_NODE)
    place = _open_torchrun(words, launch)
    if place is not None and offer.count is not None:
        remarks[f"note: torchrun says no --nproc-per-node: {offer.count} processes, one on each GPU of a node"] = None
        words = [*words[: place + 1], "--nproc-per-node", str(offer.count), *words[place + 1 :]]
        return NodeOfDevices(device, offer.count), words
    if launch.processes is None:  # no launcher: the command is a single process
        if (offer.count or 1) > 1:
            remarks[
                f"note: {words[0]} starts one process: recorded on 1 of the {offer.count} GPUs; torchrun starts more"
            ] = None
        return NodeOfDevices(device, offer.count or 1), words
    count = offer.count or launch.per_node
    if launch.per_node > count or (launch.per_node < count and not may_idle):
        problem = f"{count}x{device} is a node of {count}, and the command starts {launch.per_node} processes on each"
        raise InputError("--devices", problem, f"write {launch.per_node}x{device}, or --nproc-per-node {count}")
    return NodeOfDevices(device, count), words


def _open_torchrun(words: Sequence[str], launch: Launched) -> int | None:
    """Return the index in ``words`` of a torchrun that does not say how many processes a node has; None: there is none."""
    for place in range(len(words) - len(launch.script)):
        if os.path.basename(words[place]) == "torchrun" or words[place] == "torch.distributed.run":
            options = words[place + 1 : len(words) - len(launch.script)]
            return None if any(_key(word).startswith("nproc_per_node") for word in options) else place
    return None


def _variants(words: list[str], knobs: Sequence[Knob]) -> list[_Variant]:
    """Return the command as given and with each combination of the knobs' values, without repeats.

    A combination that spells the given command takes its place and is marked as given too.
    """
    given_values = {knob.name: value for knob in knobs if (value := knob.value_in(words)) is not None}
    # words of a command -> its variant
    variants = {tuple(words): _Variant(tuple(words), given_values, is_given=True)}
    for values in product(*(knob.values for knob in knobs)):
        changed = words
        for knob, value in zip(knobs, values, strict=True):
            changed = knob.set_in(changed, value)
        value_by_name = dict(zip((knob.name for knob in knobs), values, strict=True))
        is_given = tuple(changed) in variants  # the knobs' values differ, so no two combinations spell one command
        variants[tuple(changed)] = _Variant(tuple(changed), value_by_name, is_given)
    return list(variants.values())


def _memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _ranked(command: str, knobs: Sequence[Knob], tried: Sequence[TriedCommand]) -> CommandPlan:
    """Return the plan of ``command`` with the tried commands ranked.

    First come those that fit, the fastest first, then those that do not fit, the least memory first, then the failed ones.
    Speed is tokens per second where the variants' samples differ in length, else samples per second.
    """
    rows = [one.row for one in tried if one.row is not None]
    sample_tokens = {round((row.tokens_per_s or 0.0) / row.samples_per_s) for row in rows}
    by_tokens = len(sample_tokens) > 1 and 0 not in sample_tokens  # 0: a step without tokens, which has no rate of them
    plan = CommandPlan(
        command=command,
        knobs={knob.name: list(knob.values) for knob in knobs},
        ranked_by="tokens_per_s" if by_tokens else "samples_per_s",
        tried=list(tried),
    )

    def order(one: TriedCommand) -> tuple[int, float, str]:
        """Return the sort key of a command: (0 fits, 1 does not fit, 2 failed; order among these; the command for ties)."""
        if one.row is None:
            return 2, 0.0, one.command
        if not one.row.fits:
            return 1, float(one.row.reserved_bytes), one.command
        return 0, -plan.rate(one), one.command

    return plan.model_copy(update={"tried": sorted(tried, key=order)})
