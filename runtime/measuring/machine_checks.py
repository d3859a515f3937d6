"""Checks this machine by trying what ddltool needs: packages, ports, gloo, NCCL, clocks, folders.

Start at :func:`examine`. No check raises, so that a broken machine gets a whole list. A status is ``ok`` (with an empty
remedy), ``failed`` (some command will not work), ``warning`` (figures will be worse, or a part that may not be needed
fails) or ``optional`` (an extra is not installed).
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from ddltool.analyzers.step.measured.machines import Node, Nodes, named
from ddltool.errors import DdlToolError
from ddltool.results import Machine, MachineCheck
from ddltool.runtime.measuring.children import Children, meeting_place

PACKAGES = (
    *("torch", "onnx", "numpy", "pandas", "scipy", "ortools", "networkx", "pydantic"),
    *("PyYAML", "psutil", "typer", "rich"),
)
OPTIONAL = {
    "altair": "pictures of report: pip install altair vl-convert-python",
    "scikit-learn": "demo: pip install scikit-learn",
    "statsmodels": "balance --predictor arima: pip install statsmodels",
    "transformers": "sources transformers:NAME: pip install 'ddltool[transformers]'",
    "ray": "sweep --engine ray: pip install 'ddltool[ray]'",
}
PATIENCE_S = 20.0
"""Seconds of silence, while two processes start, connect or reduce, after which they count as hung."""
_MEETING_S, _IMPORT_S = 5.0, 120.0
"""Seconds that processes may take to connect, and that an import may take."""
COARSE_CLOCK_S = 1e-5
"""A clock with larger steps than this, in seconds, is a warning."""
SHARED_MEMORY_BYTES = 128 * 2**20
"""Less shared memory than this is a warning."""
FREE_BYTES = 2**30
"""Less free space in a folder than this is a warning."""
_ELEMENTS = 262_144  # one MiB of float32
_REPEATS = 20  # number of reductions that are timed
_RATE_TRIES = 8  # how often a piece of work is timed; the shortest time counts
# Large enough to keep a core busy, small enough to take a moment: the side of a square matrix, and the numbers in a copy.
_MATRIX_SIZE = 768
_COPIED_FLOATS = 1 << 24


def examine() -> tuple[list[MachineCheck], Machine]:
    """Return (all checks, the figures of the machine).

    The two processes that try the backends start first, and import torch while the other checks are made.
    """
    port = check_store_port()
    has_torch = importlib.util.find_spec("torch") is not None
    with contextlib.ExitStack() as stack:
        children = None
        if has_torch and port.status == "ok":
            with contextlib.suppress(OSError):
                children = stack.enter_context(Children(_try_backends, [(0,), (1,)]))
        machine = machine_figures()
        checks = [_check("python", f"{machine.python}, {sys.executable}"), *check_packages(), check_load(machine)]
        if has_torch and port.status == "ok":
            checks += [check_cuda(machine), port, *check_processes(children)]
            checks += check_torchvision()
        else:
            checks.append(port)
    # The clock is checked after the processes have ended, because on a busy machine a fine clock looks coarse.
    working = check_folder("this folder", Path.cwd(), required=False, remedy="give -o FILE in a writable folder")
    return [*checks, check_clock(), working, check_temporary(), check_shared_memory(), *_check_extras()], machine


def _check(name: str, found: str, status: str = "ok", remedy: str = "", *, fine: bool = False) -> MachineCheck:
    """Return the outcome of the check ``name``.

    Args:
        name: what was checked, as the list of checks shows it.
        found: what was found, in words.
        status: "ok", "failed", "warning" or "optional".
        remedy: what the user may do about it.
        fine: True: the status is "ok", and ``status`` and ``remedy``, which are meant for the other case, are ignored.
    """
    return MachineCheck(name=name, status="ok" if fine else status, found=found, remedy="" if fine else remedy)


def machine_figures() -> Machine:
    """Return the versions, devices and memory (GiB) of this machine; without torch, no devices."""
    cuda: dict[str, Any] = {"cuda_devices": [], "cuda_build": None, "gloo": False}
    if importlib.util.find_spec("torch") is not None:
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        cuda = {"cuda_devices": gpus, "cuda_build": torch.version.cuda, "gloo": gloo}
    return Machine(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        **cuda,
    )


def machine_nodes() -> Nodes:
    """Return this machine as a cluster: its GPUs, a node for each kind, or without GPUs its CPU with rates measured now."""
    import torch

    name = platform.node() or "here"
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpu_counts = Counter((device.name, round(device.total_memory / 2**30, 1)) for device in devices)  # by (name, GiB)
    if gpu_counts:
        nodes = (Node(name=name, device=gpu, count=count, memory_gib=gib) for (gpu, gib), count in gpu_counts.items())
        return Nodes(nodes=tuple(named(node) for node in nodes))
    memory = round(psutil.virtual_memory().total / 2**30, 1)
    flops, bytes_per_s = _cpu_rates()
    spec = {"architecture": "CPU", "peak_flops": {"float32": flops}, "memory_bytes_per_s": bytes_per_s}
    remark = f"{name}: no GPU; the CPU's rates were measured in a moment, ddltool profile measures the model's own step"
    node = Node(name=name, device="cpu", count=1, memory_gib=memory)
    return Nodes(nodes=(node,), remarks=(remark,), specs={"cpu": {**spec, "memory_gib": memory}})


def _cpu_rates() -> tuple[float, float]:
    """Return the best rates of this CPU: (FLOP/s of a float32 matrix product, bytes/s read and written by a copy)."""
    import torch

    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE)
    source = torch.ones(_COPIED_FLOATS)

    def shortest_s(work: Callable[[], object]) -> float:
        """Return the shortest time of :data:`_RATE_TRIES` runs of ``work`` in seconds, after one to warm up."""
        work()
        seconds = []
        for _ in range(_RATE_TRIES):
            started_s = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started_s)
        return min(seconds)

    target = torch.empty_like(source)
    # Two operations, a multiplication and an addition, for each of n^3 terms.
    flops_per_s = 2.0 * _MATRIX_SIZE**3 / shortest_s(lambda: matrix @ matrix)
    bytes_per_s = 8.0 * len(source) / shortest_s(lambda: target.copy_(source))  # 4 bytes read, 4 written
    return float(f"{flops_per_s:.3g}"), float(f"{bytes_per_s:.3g}")


def installed(name: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages() -> list[MachineCheck]:
    """Return a single check if all packages are installed, else one for each missing package."""
    missing = [name for name in PACKAGES if installed(name) is None]
    if not missing:
        return [_check("packages", f"all {len(PACKAGES)} there; torch {installed('torch')}")]
    return [_check(name, "missing", "failed", f"pip install {name}, or install ddltool again") for name in missing]


def check_torchvision() -> list[MachineCheck]:
    """Return the check that torchvision can be imported with this torch, because transformers imports it.

    The list is empty if torchvision is not installed. The import is tried in another process.
    """
    if importlib.util.find_spec("torchvision") is None:
        return []
    versions = f"torchvision {installed('torchvision')}, torch {installed('torch')}"
    remedy = (
        "it was built for another torch, and trainers that import it fail: install both from one index (pip install torch "
        "torchvision --index-url ...), or pip uninstall torchvision"
    )
    try:
        command = (sys.executable, "-c", "import torchvision")
        tried = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [_check("torchvision", f"{versions}: not tried ({type(error).__name__})", "warning", remedy)]
    reason = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    found = f"{versions}: {reason}" if tried.returncode else versions
    return [_check("torchvision", found, "warning", remedy, fine=not tried.returncode)]


def check_load(machine: Machine) -> MachineCheck:
    """Return the check that the load, the mean of the last minute, is at most the number of cores."""
    load = os.getloadavg()[0]
    found = f"{machine.cpu_count} core(s), {machine.memory_gib} GiB of memory, load {load:.1f}"
    remedy = "other programs keep it busy: measured times will be noisy (profile says how sure each is)"
    return _check("machine", found, "warning", remedy, fine=load <= machine.cpu_count)


def check_cuda(machine: Machine) -> MachineCheck:
    """Return the check of CUDA, which names the devices or says why there are none."""
    if machine.cuda_devices:
        return _check("CUDA", f"{len(machine.cuda_devices)}: {', '.join(dict.fromkeys(machine.cuda_devices))}")
    if machine.cuda_build is None:
        remedy = "GPUs are predicted (ddltool predict), not measured; to measure, install a CUDA build of torch"
        return _check("CUDA", "torch is built without it", "optional", remedy)
    remedy = "look at nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES"
    return _check("CUDA", f"torch is built for CUDA {machine.cuda_build}, no device seen", "warning", remedy)


def check_clock() -> MachineCheck:
    """Return the check of the clock's resolution, which is the smallest step seen in 20 ms."""
    smallest_s = float("inf")
    previous_s = time.perf_counter()
    end_s = previous_s + 0.02
    while previous_s < end_s:
        present_s = time.perf_counter()
        if present_s > previous_s:
            smallest_s = min(smallest_s, present_s - previous_s)
        previous_s = present_s
    remedy = "measured times will be coarse: profile with larger batches, or mend the clock source of the machine"
    found = f"steps of {smallest_s * 1e9:,.0f} ns"
    return _check("clock", found, "warning", remedy, fine=smallest_s <= COARSE_CLOCK_S)


def check_store_port() -> MachineCheck:
    """Return the check that a process can listen, connect and receive on 127.0.0.1, as torch's store does."""
    problem, remedy = "", "bring the loopback interface up (ip link set lo up), and allow local connections"
    try:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(server.getsockname()[:2], timeout=2.0))
            accepted = stack.enter_context(server.accept()[0])
            client.sendall(b"1")
            accepted.settimeout(2.0)
            if accepted.recv(1) != b"1":
                problem = "connected, nothing received"
    except OSError as error:
        problem = error.strerror or str(error)
    found = f"127.0.0.1: {problem}" if problem else "127.0.0.1 listens and connects"
    return _check("store port", found, "failed", remedy, fine=not problem)


def check_folder(name: str, folder: str | Path, *, required: bool, remedy: str) -> MachineCheck:
    """Return the check that a file can be written in ``folder`` or its nearest existing parent; it is removed again.

    If not, the status is ``failed`` for a ``required`` folder and ``warning`` otherwise. Less than one GiB of free space
    is a ``warning``.
    """
    existing = Path(folder)
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return _check(name, f"{folder}: {error.strerror or error}", "failed" if required else "warning", remedy)
    found = f"{folder}, {free / 2**30:,.1f} GiB free"
    return _check(name, found, "warning", "make room, or " + remedy, fine=free >= FREE_BYTES)


def check_temporary() -> MachineCheck:
    """Return the check that there is a folder for temporary files, and that it can be written."""
    remedy = "set TMPDIR to a writable folder"
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return _check("temporary files", str(error.strerror or error), "failed", remedy)
    return check_folder("temporary files", folder, required=True, remedy=remedy)


def check_shared_memory(folder: str = "/dev/shm") -> MachineCheck:
    """Return the check of the size of shared memory, through which data workers send batches.

    Containers often have only 64 MiB of it. A system without ``folder`` is ok.
    """
    try:
        total = shutil.disk_usage(folder).total
    except OSError:
        return _check("shared memory", "not limited here")
    remedy = "loaders with num_workers may die of it: start the container with --shm-size 1g"
    found = f"{folder}, {total / 2**20:,.0f} MiB"
    return _check("shared memory", found, "warning", remedy, fine=total >= SHARED_MEMORY_BYTES)


def _check_extras() -> list[MachineCheck]:
    """Return the checks of optional packages and programs; the remedy of a missing one names the commands that need it."""
    extras = {name: (installed(name), remedy) for name, remedy in OPTIONAL.items()}
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    extras["chromium"] = (browser, "only the tests that look at reports need it: apt-get install chromium")
    return [
        _check(name, found or "not installed", "optional", remedy, fine=bool(found))
        for name, (found, remedy) in extras.items()
    ]


# -- two processes, which try gloo over the loopback interface, then over the default one, then NCCL if there is CUDA


Answers = dict[tuple[str, int], tuple[str, float]]
"""The outcomes of attempts to reduce over a backend: (problem, median seconds) by (name of the attempt, rank).

The problem is "" where the attempt worked."""


def check_processes(children: Children | None) -> list[MachineCheck]:
    """Return the checks of gloo and NCCL, which two child processes try; ``children`` is None if they did not start.

    If a process dies or hangs, the attempts that it has not finished fail.
    """
    answers: Answers = {}
    problem = "" if children is not None else "processes cannot be started"

    def take_answer(rank: int, message: tuple[str, tuple[str, float]]) -> bool:
        """Keep one process's answer (name of the attempt, (problem, seconds)); return whether more will come."""
        name, outcome = message
        answers[name, rank] = outcome
        return name != "done"

    if children is not None:
        try:
            children.gather((0, 1), "two processes", take_answer, PATIENCE_S)
        except DdlToolError as error:
            problem = str(error)
    remedy = (
        "make the host's name resolve to an address of this machine (/etc/hosts), or set GLOO_SOCKET_IFNAME "
        "(lo on one machine, the network interface on several)"
    )
    needed = "profile --replicas, the hook and demo need it; GLOO_SOCKET_IFNAME=lo?"
    return [
        _check_reduction("gloo", answers, 2, problem, "failed", needed),
        _check_reduction("gloo, default network", answers, 2, problem, "warning", remedy),
        check_nccl(answers, problem),
    ]


def _check_reduction(
    name: str, answers: Answers, processes: int, problem: str, status: str, remedy: str
) -> MachineCheck:
    """Return the check of the attempt ``name``, which is ok if at least ``processes`` processes answered without a problem.

    Args:
        name: of the attempt, which is also the check's.
        answers: the outcomes of all attempts.
        processes: how many processes must have answered.
        problem: why some have not.
        status, remedy: those of the check if the attempt has failed.
    """
    outcomes = [outcome for (attempt, _), outcome in answers.items() if attempt == name]
    problems = [text for text, _ in outcomes if text]
    if problems or len(outcomes) < processes:
        return _check(name, problems[0] if problems else problem, status, remedy)
    slowest_s = max(seconds for _, seconds in outcomes)
    count = f"{len(outcomes)} process{'es' if len(outcomes) > 1 else ''}"
    return _check(name, f"{count} added 1 MiB in {slowest_s * 1e3:.2f} ms (median)")


def check_nccl(answers: Answers, problem: str) -> MachineCheck:
    """Return the check of a reduction over NCCL; it is ``optional`` if there was no CUDA device to try it.

    ``problem``: why some answers are missing; "" if none are.
    """
    if any(name == "NCCL" for name, _ in answers):
        remedy = "training on several GPUs needs it; run with NCCL_DEBUG=INFO to see why"
        return _check_reduction("NCCL", answers, 1, problem, "failed", remedy)
    if problem:
        return _check("NCCL", problem, "warning", "see the line on gloo first")
    remedy = "nothing to do for work on the CPU; else install a CUDA build of torch and its driver"
    return _check("NCCL", "no CUDA device to try it on", "optional", remedy)


def _try_backends(rank: int, results: Connection) -> None:
    """Reduce over every backend, as process ``rank`` of two; send (name, (problem or "", median seconds)) of each attempt.

    The name of the last message is "done". gloo is tried twice: first over the loopback interface or the one that the
    user has chosen, then over the interface that gloo chooses by the host's name.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # silence: backends print pages about problems that take one line here
    chosen_interface = os.environ.get("GLOO_SOCKET_IFNAME")  # None: first the loopback interface is tried
    os.environ["GLOO_SOCKET_IFNAME"] = chosen_interface or "lo"
    import torch

    torch.set_num_threads(1)

    def attempt(name: str, backend: str, world: int, device: Any) -> bool:
        """Time a reduction over ``world`` processes, send the outcome as ``name``, and return whether it worked."""
        problem, median_s = "", 0.0
        try:
            median_s = _time_reduction(rank, name, backend, world, device)
        except Exception as error:  # whatever a backend raises is the problem to report
            lines = str(error).splitlines() or [type(error).__name__]
            problem = lines[0][:120]
        results.send((name, (problem, median_s)))
        return not problem

    cpu = torch.device("cpu")
    gloo_works = attempt("gloo", "gloo", 2, cpu)
    if chosen_interface is None:
        del os.environ["GLOO_SOCKET_IFNAME"]
    if gloo_works:
        attempt("gloo, default network", "gloo", 2, cpu)
    else:
        results.send(("gloo, default network", ("not tried, as the line above failed", 0.0)))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank < devices:
        attempt("NCCL", "nccl", min(devices, 2), torch.device("cuda", rank))
    results.send(("done", ("", 0.0)))


def _time_reduction(rank: int, name: str, backend: str, world: int, device: Any) -> float:
    """Return the median seconds of an all-reduce of one MiB over ``world`` processes, of which this one is ``rank``.

    ``name``: of the attempt, at whose file the processes meet. Raises what the backend raises, and RuntimeError for a
    wrong sum.
    """
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=_MEETING_S)
    dist.init_process_group(backend, init_method=meeting_place(name), rank=rank, world_size=world, timeout=limit)
    try:
        seconds = []
        for _ in range(_REPEATS):
            tensor = torch.full((_ELEMENTS,), float(rank + 1), device=device)
            started_s = time.perf_counter()
            dist.all_reduce(tensor)
            total = float(tensor[-1].item())  # also waits for the device
            seconds.append(time.perf_counter() - started_s)
            if total != world * (world + 1) / 2:
                raise RuntimeError(f"the sum over {world} processes came out as {total:g}")
        return statistics.median(seconds)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
