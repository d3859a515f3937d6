"""What sharing out samples by length gains: predicted, and measured in four gloo processes that compute real attention.

    python benchmarks/bench_lengths.py [--steps 10] [--repeats 3] [--picture docs/lengths.png]

Lengths are drawn from the shares below 1K, 4K, 8K and 32K tokens that Skrull (arXiv 2505.19609, table 1) publishes of three
datasets, evenly by their logarithm within each class, from 64 tokens up and cut at 32K; all are divided by 8, those of
ChatQA2 by 32, so that a CPU computes them. A pass is two causal transformer blocks of width 64: padded batches, or documents
behind one another whose attention stays within each. The cost of a sample, padded and not, is fitted to passes that are timed
first; the batches are those of the hook's loaders, without lengths and with. A rank's seconds are those of its thread on a
core, the least of all repeats, so that a busy machine takes part as little as it can; a step lasts as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ddltool import runtime
from ddltool.analyzers.answers.reporting.charts import drawn
from ddltool.analyzers.answers.reporting.figures import Line, Lines
from ddltool.analyzers.job.balancing.assigning import balanced
from ddltool.analyzers.job.balancing.lengths import LengthsJob, SampleCost, TimedSteps, compare
from ddltool.artifacts import save
from ddltool.plans import Enforcement, RankEnforcement
from ddltool.runtime.processes.batches import epoch_order

ROOT = Path(__file__).resolve().parents[1]
EDGES = (64, 1024, 4096, 8192, 32768)
SHARES = {
    "Wikipedia": (0.8788, 0.9934, 0.9992, 1.0),
    "LMSYS-Chat-1M": (0.8712, 0.9935, 0.9987, 1.0),
    "ChatQA2-Long-SFT": (0.2192, 0.3148, 0.4043, 1.0),
}
"""Of the samples, up to each edge after the first."""
SCALES = {"Wikipedia": 8, "LMSYS-Chat-1M": 8, "ChatQA2-Long-SFT": 32}
WAYS = {"padded": "padded", "sorted": "padded, lengths=", "unpadded": "unpadded", "balanced": "unpadded, lengths="}
RANKS, OWN, WIDTH, BLOCKS, WORDS = 4, 8, 64, 2, 97
Costs = dict[bool, SampleCost]
"""Of samples in padded passes, and in others."""


def lengths_like(name: str, samples: int, seed: int = 0) -> np.ndarray:
    """Return (samples,) lengths with a dataset's published shares, divided by its scale."""
    chance = np.random.default_rng(seed)
    classes = np.searchsorted(SHARES[name], chance.random(samples), side="right").clip(max=len(EDGES) - 2)
    low, high = np.log(np.array(EDGES)[classes]), np.log(np.array(EDGES)[classes + 1])
    return np.maximum(np.exp(chance.uniform(low, high)) / SCALES[name], 2).astype(np.int64)


class Block(nn.Module):
    """Attention within documents, then two layers, over tokens (1, n, WIDTH) or padded ones (samples, n, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor, documents: list[int] | None) -> Tensor:
        parts = [self.mixed(tokens)] if documents is None else self.mixed(tokens).split(documents, dim=1)
        attended = []
        for part in parts:
            query, key, value = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in part.chunk(3, dim=-1))
            out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            attended.append(out.transpose(1, 2).flatten(2))
        tokens = tokens + self.joined(torch.cat(attended, dim=1))
        out = tokens + self.narrow(nn.functional.gelu(self.wide(tokens)))
        return out


class Model(nn.Module):
    """A small language model; the loss of a pass is the sum over its words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, words: Tensor, documents: list[int] | None) -> Tensor:
        tokens = self.embedded(words)
        for block in self.blocks:
            tokens = block(tokens, documents)
        logits = self.out(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, words.flatten(), reduction="sum", ignore_index=0)


class Texts(Dataset[int]):
    """Lengths by index: words are made where a batch is."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> int:
        return int(self.lengths[index])


def words_of(lengths: list[int], padded: bool) -> tuple[Tensor, list[int] | None]:
    """Return the words of a pass, and its documents where it is not padded."""
    if not padded:
        return torch.ones(1, sum(lengths), dtype=torch.int64), lengths
    words = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        words[row, :length] = 1
    return words, None


def pass_s(model: nn.Module, lengths: list[int], padded: bool, hook: runtime.Hook | None = None) -> float:
    """Return the seconds on a core of a forward and a backward pass."""
    words, documents = words_of(lengths, padded)
    begin_s = time.thread_time()
    loss = model(words, documents)
    forward_s = time.thread_time() - begin_s
    if hook is not None:
        loss = hook.loss(loss, reduction="sum")  # it measures losses in the first updates, which is not counted here
    begin_s = time.thread_time()
    loss.backward()
    return forward_s + time.thread_time() - begin_s


def fitted_cost(model: DistributedDataParallel, lengths: np.ndarray, padded: bool, repeats: int = 3) -> SampleCost:
    """Return the cost of samples in seconds, the mean over ranks, of timed passes: of samples alike, and of a batch's.

    All ranks time theirs together, for they share the machine in training, too.
    """
    chance, longest = np.random.default_rng(1), int(lengths.max())
    passes = [[length] * count for length in (2, 8, 32, 128, 512) if length <= longest for count in (1, 4, 8)]
    passes += [[longest], *(chance.choice(lengths, count).tolist() for count in (4, *[8] * 8, 12, 16))]
    with model.no_sync():
        own_s = torch.tensor([min(pass_s(model, each, padded) for _ in range(repeats)) for each in passes])
    model.zero_grad()
    dist.all_reduce(own_s)
    times = (own_s / RANKS).tolist()
    computed = [[max(each)] * len(each) if padded else each for each in passes]
    rows = [(sum(each), sum(length**2 for length in each), len(each), 1.0) for each in computed]
    terms = np.array(rows, dtype=np.float64) / np.array(times)[:, None]
    scale = terms.max(axis=0)
    found = (nnls(terms / scale, np.ones(len(times)))[0] / scale).tolist()
    return SampleCost(**dict(zip(("per_token", "per_square", "per_sample", "per_pass"), found, strict=True)))


def rank_main(rank: int, folder: str, name: str, steps: int, repeats: int, answers: Any) -> None:
    """One rank: time an epoch of each way, ``repeats`` times; rank 0 answers with costs and (ranks, ways, steps) seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    lengths = lengths_like(name, steps * RANKS * OWN)
    model = DistributedDataParallel(Model())
    costs = {padded: fitted_cost(model, lengths, padded) for padded in (False, True)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hook = runtime.attach(f"{folder}/enforce.json", model=model, optimizer=optimizer, dataset=Texts(lengths))
    shared = {
        way: runtime.Lengths(lengths, cost=(each.per_token, each.per_square, each.per_sample), padded=padded)
        for way, (padded, each) in zip(("balanced", "sorted"), costs.items(), strict=True)
    }
    seconds = np.full((len(WAYS), steps), np.inf)
    for _, (row, way) in itertools.product(range(repeats), enumerate(WAYS)):
        loader = hook.dataloader(batch_size=OWN, shuffle=True, seed=0, lengths=shared.get(way), collate_fn=list)
        for step, batch in enumerate(loader):
            taken_s = pass_s(model, batch, way in ("padded", "sorted"), hook)
            seconds[row, step] = min(seconds[row, step], taken_s)
            optimizer.step()
            optimizer.zero_grad()
    everybody: list[Any] = [None] * RANKS
    dist.all_gather_object(everybody, seconds)
    if rank == 0:
        answers.put((costs, np.array(everybody)))
    dist.destroy_process_group()


def measured(name: str, steps: int, repeats: int) -> tuple[Costs, np.ndarray]:
    """Return the fitted costs and the (ranks, ways, steps) seconds of computing."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [RankEnforcement(rank=rank, device_type="cpu", ests=1, local_batch_size=OWN) for rank in range(RANKS)]
        config = Enforcement(
            job="lengths", strategy="bsp", world_size=RANKS, total_batch_size=RANKS * OWN, ranks=ranks, telemetry=None
        )
        save(config, Path(folder) / "enforce.json")
        answers = context.Queue()
        processes = [
            context.Process(target=rank_main, args=(rank, folder, name, steps, repeats, answers))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        try:
            costs, seconds = answers.get(timeout=1800)
        finally:
            for process in processes:
                process.join(30)
                process.kill()
    return costs, seconds


def predicted(name: str, steps: int, costs: Costs) -> dict[str, TimedSteps]:
    """Return the steps of every way over the batches that the hook's loaders hand out."""
    lengths = lengths_like(name, steps * RANKS * OWN)
    batches = lengths[epoch_order(len(lengths), True, 0).numpy()].reshape(steps, -1)
    found = {}
    for padded, cost in costs.items():
        job = LengthsJob(speeds=np.ones(RANKS), total_batch=RANKS * OWN, cost=cost)
        ways = ("padded", "sorted") if padded else ("unpadded", "cp_sat")
        steps_of = compare(batches, job, 0.0).steps
        found |= {"balanced" if way == "cp_sat" else way: steps_of[way] for way in ways}
    return found


def table(names: list[str], steps: int, repeats: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (predicted, measured) speed-ups over padded batches in random order, by dataset and way."""
    rows = {}
    for name in names:
        costs, of_ranks = measured(name, steps, repeats)
        seconds = dict(zip(WAYS, of_ranks.max(axis=0).mean(axis=1).tolist(), strict=True))
        expected = predicted(name, steps, costs)
        rows[name] = {
            way: (expected["padded"].per_token / expected[way].per_token, seconds["padded"] / seconds[way])
            for way in WAYS
            if way != "padded"
        }
    return rows


def _sharing_s(ranks: int) -> float:
    costs, times = np.random.default_rng(0).lognormal(6, 1, 512), []
    for _ in range(5):
        begin_s = time.thread_time()
        balanced(costs, np.ones(ranks))
        times.append(time.thread_time() - begin_s)
    return min(times)


def main() -> None:
    """Print the table and, where asked for, write its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    rows = table([*SHARES], arguments.steps, arguments.repeats)
    print("| lengths like | way | predicted | measured | error |")
    print("|---|---|---:|---:|---:|")
    for name, ways in rows.items():
        for way, (expected, found) in ways.items():
            print(f"| {name} | {WAYS[way]} | {expected:.2f} | {found:.2f} | {expected / found - 1:+.1%} |", flush=True)
    times = {ranks: _sharing_s(ranks) for ranks in (8, 64)}
    print(
        "512 samples are shared out in", ", ".join(f"{1e3 * s:.0f} ms on {ranks} ranks" for ranks, s in times.items())
    )
    if arguments.picture:
        points = {name: np.array([*ways.values()]) for name, ways in rows.items()}
        ends = np.array([1.0, max(float(each.max()) for each in points.values())])
        lines = [Line(label="equal", x=ends, y=ends)]
        lines += [
            Line(label=name, x=each[:0, 1], y=each[:0, 0], dots=(each[:, 1], each[:, 0]))
            for name, each in points.items()
        ]
        figure = Lines(
            title="Speed-up over padded batches in random order",
            lines=lines,
            xlabel="measured",
            ylabel="predicted",
        )
        arguments.picture.write_bytes(drawn([figure], "png", width=380))


if __name__ == "__main__":
    main()
