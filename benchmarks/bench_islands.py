"""Islands that meet every H steps: the loss of a small language model, and rounds over a slow link, predicted and measured.

    python benchmarks/bench_islands.py [--steps 640] [--seeds 2] [--picture docs/islands.png]

Loss: two gloo processes train a byte-level transformer (two blocks of width 64, texts of 64 bytes) on Python's own library,
with AdamW; synchronously by DDP, or with ``hook.outer`` every H steps (Nesterov, 0.7 and 0.9). All have the same batches; the
last tenth of the text is held out, and evaluated after the last outer step.

Rounds (root on Linux; left out elsewhere): each of two processes in a network namespace, joined by a link that ``tc`` limits
to 20, 100 and 500 Mbit/s each way, a million parameters, inner steps that sleep 50 ms. The prediction takes the link's rate
less the headers of its packets (1,448 of 1,514 bytes are left), and the inner step as timed without outer steps.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_network import WORKER_IP, link, obstacle
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddltool import runtime
from ddltool.analyzers.answers.reporting.charts import drawn
from ddltool.analyzers.answers.reporting.figures import Line, Lines
from ddltool.analyzers.job.barriers.islands import FragmentExchange, Rounds
from ddltool.links import Link

EVERY = (1, 8, 64)
WIDTH, BLOCKS, TEXT, BATCH, HELD_OUT = 64, 2, 64, 8, 256
RATES = (20.0, 100.0, 500.0)
PARAMETERS, SLEEP_S, PAYLOAD = 1_000_000, 0.05, 1448 / 1514
CASES: tuple[dict[str, int], ...] = (
    *({"every": every} for every in EVERY),
    {"every": 8, "overlap": 4},
    {"every": 8, "overlap": 2, "fragments": 4},
    {"every": 8, "bits": 8},
)
"""What is measured at each rate."""
_ROUNDS = {1: 6, 8: 3, 64: 2}


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(TEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks, self.out = nn.TransformerEncoder(block, BLOCKS, enable_nested_tensor=False), nn.Linear(WIDTH, 256)

    def forward(self, texts: Tensor) -> Tensor:
        """Return the mean loss of each next byte of texts (samples, TEXT + 1)."""
        hidden = self.bytes(texts[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(TEXT)
        logits = self.out(self.blocks(hidden, mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())


def library() -> Tensor:
    """Return Python's library as bytes, its files in an order that is always the same."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def texts_of(text: Tensor, samples: int, seed: int) -> Tensor:
    """Return so many texts (samples, TEXT + 1) drawn from a long one."""
    starts = torch.randint(len(text) - TEXT - 1, (samples,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[start : start + TEXT + 1] for start in starts.tolist()]).long()


def train(rank: int, every: int | None, steps: int, seed: int) -> float:
    """Return the held-out loss after ``steps`` steps; ``every`` None: synchronous."""
    torch.manual_seed(seed)
    text = library()
    split = len(text) * 9 // 10
    model = Model()
    trained: nn.Module = DistributedDataParallel(model) if every is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if every is not None:
        runtime.attach(None).outer(model, optimizer, every=every)
    for step in range(steps):
        optimizer.zero_grad()
        trained(texts_of(text[:split], BATCH, 2 * (seed * steps + step) + rank)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(model(texts_of(text[split:], HELD_OUT, 0)))


def measure(rank: int, case: dict[str, int], port: int) -> dict[str, float]:
    """Return the seconds of an inner step alone, and of one with outer steps over the link."""
    model = nn.ParameterList(nn.Parameter(part) for part in torch.zeros(8, PARAMETERS // 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for value in model.parameters():
        value.grad = torch.zeros_like(value)

    def step() -> float:
        time.sleep(SLEEP_S)
        optimizer.step()
        return time.perf_counter()

    begin = step()
    alone_s = statistics.median(np.diff([begin, *(step() for _ in range(20))]))
    group = runtime.island_group(f"{WORKER_IP}:{port}", rank, 2, meeting=port)
    outer = runtime.attach(None).outer(model, optimizer, group=group, **case)
    every, overlap = case["every"], case.get("overlap", 0)
    rounds = _ROUNDS[every]
    ends = [step() for _ in range((rounds + 1) * every + overlap)]
    outer.close()
    return {"alone_s": float(alone_s), "step_s": (ends[-1] - ends[every + overlap - 1]) / (rounds * every)}


def predicted_s(case: dict[str, int], mbit: float, step_s: float) -> float:
    """Return the seconds of an inner step with outer steps over a link of ``mbit``."""
    fragments, bits = case.get("fragments", 1), case.get("bits", 32)
    between = Link(kind="plain", bytes_per_s=mbit * 1e6 / 8 * PAYLOAD, latency_s=0.0)
    exchange = FragmentExchange(elements=PARAMETERS, islands=2, link=between, bits=bits, fragments=fragments)
    every = case["every"]
    rounds = Rounds(
        step_s=[step_s] * 2,
        every=[every] * 2,
        fragment_s=exchange.fragment_s,
        fragments=fragments,
        overlap=case.get("overlap", 0),
    )
    return rounds.round_s / every


def _rank(
    rank: int, space: str, port: int, answers: Any, body: Callable[..., Any], calls: list[tuple[Any, ...]]
) -> None:
    if space:
        with open(f"/run/netns/{space}", encoding="ascii") as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = f"v{rank}" if space else "lo"
    torch.set_num_threads(1)
    if not space:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    answers.put((rank, [body(rank, *call) for call in calls]))
    answers.close()
    answers.join_thread()
    if not space:
        dist.destroy_process_group()


def both(body: Callable[..., Any], calls: list[tuple[Any, ...]], spaces: tuple[str, str] = ("", "")) -> list[list[Any]]:
    """Return the answers of two processes, each in its namespace, to every call of ``body(rank, ...)``."""
    context = multiprocessing.get_context("spawn")
    answers, port = context.Queue(), 20_000 + os.getpid() % 10_000
    crew = [
        context.Process(target=_rank, args=(rank, space, port, answers, body, calls))
        for rank, space in enumerate(spaces)
    ]
    for process in crew:
        process.start()
    found = dict(answers.get(timeout=1800) for _ in crew)
    for process in crew:
        process.join()
    return [found[0], found[1]]


def losses(steps: int, seeds: int) -> None:
    """Print the held-out loss of each number of inner steps against synchronous training."""
    tried: list[int | None] = [None, *EVERY]
    calls = [(every, steps, seed) for every in tried for seed in range(seeds)]
    found = np.array(both(train, calls)[0]).reshape(len(tried), seeds)
    print(f"Held-out loss after {steps} steps of 2 x {BATCH} texts of {TEXT} bytes, {seeds} seeds\n")
    print("| H | loss | against synchronous, each seed |\n|---|---:|---|")
    for every, row in zip(tried, found, strict=True):
        against = ", ".join(f"{share:+.1%}" for share in row / found[0] - 1) if every else ""
        print(f"| {every or 'synchronous'} | {row.mean():.3f} | {against} |", flush=True)


def rounds(picture: Path | None) -> None:
    """Print the time of a step, predicted and measured, for each rate and case."""
    why_not = obstacle()
    if why_not:
        print(f"\nRounds are left out: {why_not}.")
        return
    print(
        "\n| Mbit/s | H | fragments | overlap | bits | predicted | measured | error |\n|---|---|---|---|---|---:|---:|---:|"
    )
    seen: dict[int, list[tuple[float, float]]] = {}
    alone: list[float] = []
    for mbit in RATES:
        with link(mbit) as spaces:
            calls = [(case, 20_000 + place) for place, case in enumerate(CASES)]
            found = both(measure, calls, spaces)
        for case, one, other in zip(CASES, *found, strict=True):
            step_s, inner_s = max(one["step_s"], other["step_s"]), max(one["alone_s"], other["alone_s"])
            expected = predicted_s(case, mbit, inner_s)
            alone.append(inner_s)
            cells = [f"{mbit:g}", case["every"], case.get("fragments", 1), case.get("overlap", 0), case.get("bits", 32)]
            cells += [f"{1e3 * expected:.0f} ms", f"{1e3 * step_s:.0f} ms", f"{expected / step_s - 1:+.1%}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)
            if [*case] == ["every"]:
                seen.setdefault(case["every"], []).append((mbit, step_s))
    if picture is not None:
        rates = np.logspace(1, 3, 60)
        inner_s = statistics.median(alone)
        lines = [
            Line(
                label=f"H = {every}",
                x=rates,
                y=np.array([predicted_s({"every": every}, rate, inner_s) for rate in rates]),
                dots=(np.array([rate for rate, _ in points]), np.array([seconds for _, seconds in points])),
            )
            for every, points in seen.items()
        ]
        figure = Lines(
            title="Time of a step by the rate of the link; dots are measured",
            lines=lines,
            xlabel="link, Mbit/s",
            ylabel="a step",
            x_axis="log",
            log_y=True,
            seconds=True,
        )
        picture.write_bytes(drawn([figure], "png", width=380))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.steps:
        losses(arguments.steps, arguments.seeds)
    rounds(arguments.picture)


if __name__ == "__main__":
    main()
