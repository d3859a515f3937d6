"""NCCL's collectives on two levels of links: closed forms, properties, published sweeps, and logs that override them."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.truth_networks import Pair, bert, mpt, sweeps
from ddltool.analyzers.step.communication.fabrics import fabric_of, own_link, read_tests
from ddltool.analyzers.step.communication.nccl import Collective, Fabric, Floor, MeasuredCollective
from ddltool.errors import InputError
from ddltool.links import DATASHEET, Link, parse_link, parse_nic
from ddltool.shipped import devices
from tests.conftest import Result

Cli = Callable[..., Result]
A100 = Fabric(inside=parse_link("nvlink3"), between=parse_nic("16x100Gbit"), gpus_per_node=8)
H100 = Fabric(inside=parse_link("nvlink4"), between=parse_nic("8x400Gbit"), gpus_per_node=8)


@pytest.mark.parametrize("latency_s", [0.0, 1e-7, 1e-4])
def test_a_flat_network_has_the_textbook_costs(latency_s: float) -> None:
    """All-reduce of S bytes on n processes: 2 (n - 1) rounds, 2 (n - 1) / n of S over the wire; small ones in a tree."""
    for n, size in itertools.product(range(2, 10), (8.0, 1e4, 4e9)):
        group = Fabric.flat(1e9, latency_s).over(n)
        ring = (n - 1) * latency_s + (n - 1) / n * size / 1e9
        tree = 2 * math.ceil(math.log2(n)) * latency_s + (1 if n == 2 else 2) * size / 1e9
        assert group.all_reduce_s(size) == pytest.approx(min(2 * ring, tree), rel=1e-9)
        assert group.all_gather_s(size) == group.reduce_scatter_s(size) == pytest.approx(ring, rel=1e-9)
        assert group.collective_s("broadcast", size) == pytest.approx((n - 1) * latency_s + size / 1e9, rel=1e-9)
    assert Fabric.flat(1e9, latency_s).over(1).all_reduce_s(4e9) == 0.0


tables = st.lists(
    st.tuples(st.sampled_from(["all_reduce", "all_gather"]), st.integers(1, 4), st.integers(1, 4)), max_size=4
)


@given(tables, st.integers(1, 4), st.integers(1, 4), st.sampled_from(["all_reduce", "all_gather"]))
def test_the_nearest_table_scales_the_model(
    made: list[tuple[Collective, int, int]], nodes: int, each: int, collective: Collective
) -> None:
    """Told apart by how far off each table is; of those alike the first. The levels weigh most, then what was measured."""
    measured = [
        MeasuredCollective(
            collective=name, replicas=count * per_node + 1, nodes=count, size_bytes=(2e8, 4e8), seconds=(0.5 + n, 2.0 + n)
        )
        for n, (name, count, per_node) in enumerate(made)
    ]  # fmt: skip
    model = replace(A100, measured=())
    n = nodes * each + 1
    found = replace(A100, measured=tuple(measured)).over(n, nodes).collective_s(collective, 2e8)

    def apart(one: MeasuredCollective) -> tuple[int, float, float]:
        levels, kind = (one.nodes == 1) != (nodes == 1), one.collective != collective
        more = max(one.replicas, n) / min(one.replicas, n), max(one.nodes, nodes) / min(one.nodes, nodes)
        return 2 * levels + kind, *more

    scale = 1.0
    for one in measured:
        if all(apart(one) <= apart(other) for other in measured):
            scale = one.seconds[0] / model.over(one.replicas, one.nodes).collective_s(one.collective, 2e8)
            break
    assert found == pytest.approx(scale * model.over(n, nodes).collective_s(collective, 2e8), rel=1e-9)


# src/graph/tuning.cc of NCCL 2.28: channels, then GB/s on one node, on two, on more; LL, a ring's LL128 (one figure), a tree's
# LL128 and Simple per channel.
VOLTA = (6, (39, 39, 20.4), 20, (20, 20, 20), (26.5, 18.5, 10))
AMPERE = (12, (87.7, 22.5, 19), 20, (20, 20, 20), (24, 23.6, 17.8))
HOPPER = (18, (141, 45, 35), 36.7, (36.7, 36.7, 29), (38.7, 41.4, 36))
BLACKWELL = (18, (282, 90, 70), 40, (55.6, 31.67, 20), (70, 42.8, 24))
YEARS = {"1": VOLTA, "2": VOLTA, "3": AMPERE, "4": HOPPER, "5": BLACKWELL}
SLOWER = {"pcie3": VOLTA, "pcie4": AMPERE, "pcie5": HOPPER}
# Microseconds of a hop by LL, LL128, Simple: (a ring's, a tree's).
HOP = {
    "nvlink": ((0.6, 1.9, 3.4), (0.6, 1.25, 4)),
    "pcie": ((1, 2.5, 5.7), (1, 1.9, 4)),
    "nic": ((2.7, 4, 14), (5, 8.5, 14)),
}
# A tree's share of its rate at 64 B, 128 B, ..., in tenths (treeCorrectionFactor).
TENTHS = (
    "10 10 10 10 9 8 7 7 7 7 6 5 4 4 5 6 7 8 9 10 10 10 10 10",
    "10 10 10 10 10 9 8 8 8 7 6 6 6 6 6 6 8 9 9 9 9 10 10 10",
    "9 9 9 9 9 9 9 8 7 6 6 5 5 5 5 6 7 8 7 7 8 9 9 9",
)


def by_hand(
    fabric: Fabric, n: int, nodes: int, size: float, collective: Collective = "all_reduce", smooth: bool = False
) -> dict[str, float]:
    """Return microseconds by algorithm and protocol, written apart from the package's, for NVLink, PCIe and cards.

    ``smooth``: without what tuning.cc corrects afterwards, a tree's rates by size and the longer steps of long messages.
    """
    inside, card = fabric.inside.kind, fabric.between.bytes_per_s / 1e9
    channels, most_ll, ring_ll128, tree_ll128, tree = SLOWER.get(inside) or YEARS[inside[-1]]
    many, here = min(nodes, 3) - 1, math.ceil(n / nodes)
    few = {"nvlink4": 0.75, "nvlink5": 0.3}.get(inside, 0.0)  # what small rings lose beside those of eight and more
    near_rate = min((1 - few / here) / (1 - few / 8), 1) * fabric.inside.bytes_per_s / 1e9
    rate = min([near_rate] * (here > 1) + [card] * (nodes > 1))
    found: dict[str, float] = {}
    for place, protocol in enumerate(("LL", "LL128", "Simple")):
        if protocol == "LL128" and here > 1 and inside.startswith("pcie"):
            continue
        (near, near_tree), (far, far_tree) = (tuple(each[place] for each in HOP[kind]) for kind in (inside[:-1], "nic"))
        near, near_tree = (near, near_tree) if here > 1 else (0.0, 0.0)
        after_card = [2, 2, 6][place] if nodes > 1 else 0
        start = 12 + [6.6, 14, 8.4][place]
        bus = min(rate, channels * tree[2]) if nodes > 2 else rate
        bus *= 0.83 if inside == "nvlink5" and collective != "all_reduce" else 1
        bus = [min(most_ll[many], bus / 2), min(0.92 * bus, channels * ring_ll128), bus][place]
        turns = 2 if collective == "all_reduce" else 1
        if collective == "broadcast":
            hops = (n - nodes) * near + (nodes - 1) * far
            found[f"ring {protocol}"] = start + hops + size / (1e3 * bus)
            continue
        hops = (n - nodes) * max(near, after_card) + (nodes - 1) * (far if here > 1 else far_tree)
        flat = protocol == "Simple" and turns == 2 and nodes > 1 and size / (channels * n) >= 64 and not smooth
        hops *= turns * ((1.9 if channels == 6 else 1.4) if flat else 1)
        found[f"ring {protocol}"] = start + hops + size * turns * (n - 1) / n / (1e3 * bus)
        if turns == 1:
            continue
        depth = math.ceil(math.log2(nodes))
        links = [near_rate] * (here > 1) + [card * (2 if nodes == 2 else 1)] * (nodes > 1)
        whole = min(*links, channels * tree[many])
        bus = [
            min(whole / 3.8, most_ll[many]),
            min(whole * (7 / 9 if nodes == 1 else 0.9375), channels * tree_ll128[many]),
            whole,
        ][place]
        octave = min(max(math.log2(size / 64), 0), 23)
        low, high = (int(TENTHS[place].split()[round_(octave)]) / 10 for round_ in (math.floor, math.ceil))
        bus *= 1 if smooth else low + (high - low) * (octave % 1)
        hops = 2 * ((here - 1) * near_tree + depth * far_tree)
        filled = 2 * (here - 1 + depth) * channels / (1e3 * whole) * min(size / channels / 8, 2**19) if place else 0
        found[f"tree {protocol}"] = 12 + [6.8, 14, 8.4][place] + hops + filled + 2 * size / (1e3 * bus)
    if inside in ("nvlink4", "nvlink5") and 2 < here <= 8 and turns == 2:
        bus = {"4": 1.29, "5": 1.0}[inside[-1]] * fabric.inside.bytes_per_s / 1e9
        bus = min(bus, card * (2 if nodes == 2 else 1)) if nodes > 1 else bus
        hops = 2 * math.ceil(math.log2(nodes)) * 20.9
        found["nvls Simple"] = 12 + 25 + hops + size * 2 * (n - 1) / n / (1e3 * bus)
    return found


SIZES = np.array([4.0 * 1.5**step for step in range(53)])


@pytest.mark.parametrize("cards", ["0.1Gbit", "4x100Gbit", "16x400Gbit"])  # what binds: cards, or what channels carry
@pytest.mark.parametrize("inside", [name for name in DATASHEET if name != "infinity"])  # AMD's is RCCL's
def test_times_and_choices_are_those_of_tuning_cc(inside: str, cards: str) -> None:
    """On one node, two, and more; one process per node, a few, and eight; sizes from 4 B to 5 GiB."""
    fabric = Fabric(inside=parse_link(inside), between=parse_nic(cards), gpus_per_node=8)
    for nodes, per_node in ((1, 2), (1, 8), (2, 1), (2, 2), (2, 8), (3, 1), (3, 8), (5, 2)):
        n = nodes * per_node
        group = fabric.over(n, nodes)
        every = [by_hand(fabric, n, nodes, size) for size in SIZES]
        for algorithm in {way.split()[0] for way in every[0]}:
            alone = replace(fabric, algorithms=(algorithm,)).over(n, nodes)
            least = [min(time for way, time in ways.items() if way.startswith(algorithm)) for ways in every]
            assert 1e6 * alone.all_reduce_s(SIZES) == pytest.approx(least, rel=1e-9)
        for size, ways in list(zip(SIZES, every, strict=True))[:: nodes + per_node]:
            assert ways[" ".join(group.chosen("all_reduce", size))] == pytest.approx(min(ways.values()), rel=1e-9)
        one_way = [min(by_hand(fabric, n, nodes, size, "all_gather").values()) for size in SIZES]
        assert 1e6 * group.all_gather_s(SIZES) == pytest.approx(one_way, rel=1e-9)
        assert (group.reduce_scatter_s(SIZES) == group.all_gather_s(SIZES)).all()
        chain = [min(by_hand(fabric, n, nodes, size, "broadcast").values()) for size in SIZES]
        assert 1e6 * group.collective_s("broadcast", SIZES) == pytest.approx(chain, rel=1e-9)


@pytest.mark.parametrize("inside", ["nvlink2", "nvlink4"])
def test_nothing_is_faster_than_the_floor_which_slow_cards_reach(inside: str) -> None:
    """Where the cards alone set the rates and nobody joins, the floor is the smooth time; whoever joins, it holds."""
    fabric = Fabric(inside=parse_link(inside), between=parse_nic("10Gbit"), gpus_per_node=8)
    plain = Fabric.flat(1e9, 1e-4)
    for n, nodes in ((16, 2), (24, 3), (40, 5)):
        floor, flat = (Floor.of(net.over(k, nodes), [net], nodes) for net, k in ((fabric, n), (plain, nodes)))
        assert floor is not None
        assert flat is not None
        smooth = [min(by_hand(fabric, n, nodes, size, smooth=True).values()) for size in SIZES]
        assert 1e6 * floor.all_reduce_s(SIZES) == pytest.approx(smooth, rel=1e-9)
        assert 1e6 * floor.all_reduce_s(SIZES[30]) == pytest.approx(smooth[30])
        assert flat.all_reduce_s(SIZES) == pytest.approx(plain.over(nodes).all_reduce_s(SIZES))
    # NCCL's constants are in a time where any link in use is known by more than its rate.
    known = replace(fabric, between=plain.between)
    nets = (fabric, known, replace(known, inside=Link(kind="plain", bytes_per_s=1e11)))
    for net, n, nodes, more, spread in itertools.product(nets, (2, 3, 9, 16), (2, 3), (0, 1, 8), (0, 1, 5)):
        if n >= nodes:
            floor = Floor.of(net.over(n, nodes), [net], nodes + spread)
            assert floor is not None
            joined = net.over(max(n + more, nodes + spread), nodes + spread).all_reduce_s(SIZES)
            assert (floor.all_reduce_s(SIZES) <= joined * (1 + 1e-9)).all()
    assert Floor.of(fabric.over(8), [fabric], 2) is None  # on one node nothing is known of those who join


def test_what_is_chosen_follows_the_size() -> None:
    """LL for the smallest messages, then LL128, then Simple; switches reduce where there are any."""
    assert A100.over(16).chosen("all_reduce", 256.0) == ("tree", "LL")
    assert A100.over(16).chosen("all_reduce", 4e6)[1] == "LL128"
    assert A100.over(8).chosen("all_reduce", 8e9) == ("ring", "Simple")
    assert H100.over(8).chosen("all_reduce", 8e9) == ("nvls", "Simple")
    assert H100.over(8).chosen("all_reduce", 64.0) == ("ring", "LL")
    for inside, between in (("pcie4", A100.between), ("nvlink3", Fabric.flat(1e9, 5e-5).between)):
        group = Fabric(inside=parse_link(inside), between=between, gpus_per_node=8).over(16)
        assert "LL128" not in {group.chosen("all_reduce", 2.0**octave)[1] for octave in range(34)}


def test_boards_of_eight_use_the_links_to_those_that_take_part() -> None:
    """Of eight that are wired to each other n use the links to n - 1, however many a node has room for."""
    fabric = Fabric(inside=parse_link("infinity"), between=parse_nic("100Gbit"), gpus_per_node=16)
    whole = 1e15 / fabric.over(8).all_gather_s(1e15) * 7 / 8
    assert whole <= fabric.inside.bytes_per_s
    for n in range(2, 17):
        rate = 1e15 / fabric.over(n).all_gather_s(1e15) * (n - 1) / n
        assert rate == pytest.approx(min((n - 1) / 7, 1) * whole, rel=1e-6)


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    inside = parse_link(draw(st.sampled_from([*DATASHEET, "20GB/s"])))
    between = draw(st.sampled_from([parse_nic("100Gbit"), parse_nic("8x400Gbit"), Link(kind="plain", bytes_per_s=1e9)]))
    delay = draw(st.sampled_from([0.0, 1e-5, 1e-4]))
    return Fabric(
        inside=inside, between=replace(between, latency_s=delay), gpus_per_node=draw(st.sampled_from([1, 4, 8]))
    )


@given(fabrics(), st.integers(2, 300), st.floats(0, 34))
def test_more_bytes_and_more_replicas_take_no_less(fabric: Fabric, replicas: int, octave: float) -> None:
    size = 2.0**octave
    group = fabric.over(replicas)
    for seconds in (group.all_reduce_s, group.all_gather_s, group.reduce_scatter_s):
        assert 0 < seconds(size) <= seconds(2 * size) * (1 + 1e-9)
    assert (
        group.all_gather_s(size) <= group.all_reduce_s(size) * (1 + 1e-9)
        or group.chosen("all_reduce", size)[0] != "ring"
    )
    assert group.all_gather_s(size) <= fabric.over(2 * replicas).all_gather_s(size) * (1 + 1e-9)
    # no less than the slowest link needs for the bytes that must cross it
    fastest = max(fabric.inside.bytes_per_s, fabric.between.bytes_per_s)
    assert group.all_gather_s(size) >= size * (replicas - 1) / replicas / fastest * (1 - 1e-9)


@given(fabrics(), st.integers(2, 300))
@settings(max_examples=25)
def test_arrays_are_as_single_sizes(fabric: Fabric, replicas: int) -> None:
    group, sizes = fabric.over(replicas), np.array([0.0, 8.0, 3e3, 7e6, 4e9])
    assert group.all_reduce_s(sizes).tolist() == [group.all_reduce_s(float(size)) for size in sizes]


def test_a_slow_network_is_left_inside_the_node() -> None:
    """HSDP over two nodes gathers within them; its gradients cross the cards once, an eighth for each process."""
    whole, inside = A100.over(16), A100.over(8)
    hybrid = A100.sharded(16, 8)
    assert hybrid.all_gather_s(1e9) == inside.all_gather_s(1e9) < 0.9 * whole.all_gather_s(1e9)
    between = replace(A100, gpus_per_node=1).over(2)
    # eight pairs share the cards: as one pair with all the bytes
    assert hybrid.reduce_scatter_s(8e9) == pytest.approx(
        inside.reduce_scatter_s(8e9) + between.all_reduce_s(8e9), rel=1e-6
    )
    assert A100.sharded(16, 16) == whole
    # two types, each on its own node: a node would hold all of them, and does not
    slow = replace(A100, between=parse_nic("10Gbit"))
    pair = Fabric.joined({"a": slow, "b": slow}, {"a": 2, "b": 1})
    apart = pair.fabric.sharded(pair.replicas, 3, pair.nodes)
    assert apart.all_gather_s(1e9) > 0.99 * 2 / 3 * 1e9 / slow.between.bytes_per_s > 10 * inside.all_gather_s(1e9)


def test_mixed_devices_are_as_fast_as_their_slowest_links() -> None:
    both = {"A100": A100, "H100": H100}
    group = Fabric.joined(both, {"A100": 8, "H100": 8})
    assert (group.replicas, group.nodes) == (16, 2)
    assert group.all_reduce_s(1e9) == A100.over(16).all_reduce_s(1e9)
    assert Fabric.joined(both, {"H100": 8, "A100": 0}) == H100.over(8)


def test_a_measured_table_overrides_the_model() -> None:
    sizes = (1e3, 1e6, 1e9)
    told = tuple(2.0 * float(A100.over(16).all_reduce_s(size)) for size in sizes)
    table = MeasuredCollective(collective="all_reduce", replicas=16, nodes=2, size_bytes=sizes, seconds=told)
    fabric = replace(A100, measured=(table,))
    assert [fabric.over(16).all_reduce_s(size) for size in sizes] == pytest.approx(list(told))
    # what was not measured by the ratio of what was
    assert fabric.over(32).all_gather_s(1e7) == pytest.approx(2 * A100.over(32).all_gather_s(1e7))


HEAD = "\n".join(
    f"#  Rank {rank:2} Group  0 Pid 1 on node-{rank // 8} device {rank % 8} [0x07] A100" for rank in range(16)
)
LOG = f"""# Collective test starting: all_reduce_perf
{HEAD}
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    85.58   12.25   22.97      0    84.50   12.41   23.27      0
  1073741824     268435456     float     sum      -1   9187.8  116.87  219.12      0   9073.4  118.34  221.89      0
"""


def test_a_log_says_what_ran_where() -> None:
    table = read_tests(LOG, "log")
    assert (table.collective, table.replicas, table.nodes) == ("all_reduce", 16, 2)
    assert table.size_bytes == (1048576.0, 1073741824.0)
    assert table.seconds == pytest.approx((85.58e-6, 9187.8e-6))
    bare = LOG.replace(HEAD, "#")  # the ratio of both rates is 2 (n - 1) / n
    assert (read_tests(bare, "log").replicas, read_tests(bare, "log").nodes) == (16, 2)
    assert read_tests(LOG.replace("all_reduce", "all_gather"), "log").collective == "all_gather"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LOG.replace("all_reduce", "alltoall"), "log: is of alltoall; one of all_reduce, all_gather"),
        (LOG.replace("busbw", "other"), "log: has no row below a header with time and busbw"),
        (LOG.replace(HEAD, "#").replace("116.87", "1.0").replace("12.25", "1.2"), "log: does not tell"),
    ],
)  # fmt: skip
def test_a_log_that_tells_too_little_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_tests(text, "log")


@pytest.mark.parametrize("name", ["nvlink9", "pcie", "fast", "", "0GB/s"])
def test_unknown_links_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"--link: .* is no link; one of nvlink1, .*240GB/s"):
        parse_link(name)


def test_no_card_is_no_network() -> None:
    with pytest.raises(InputError, match=r"--nic: '0x400Gbit' is no card; write 8x200Gbit"):
        parse_nic("0x400Gbit")


def test_published_sweeps(shared_data: Path) -> None:
    rows = sweeps(shared_data)
    error = np.array([row.error for row in rows])
    large = np.array([row.size_bytes >= 2**20 for row in rows])
    assert large.sum() >= 40
    # one row of 512 MiB lies beside its neighbours, and the first message of one sweep holds the start of all connections
    assert (np.abs(error[large]) > 0.15).sum() <= 1
    assert (np.abs(error[~large]) > 0.30).sum() <= 1
    assert np.median(np.abs(error)) < 0.08


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.parametrize(
    ("read", "least"),
    [
        # Missed: FSDP of torch 1.13 took 15 % longer than predicted; one sequence length of BERT is 27 % off.
        pytest.param(mpt, 60, marks=pytest.mark.xfail(reason="15 % off in the median", strict=True)),
        pytest.param(bert, 20, marks=pytest.mark.xfail(reason="27 % off in the worst tenth", strict=True)),
    ],
)
def test_published_steps(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Iterator[Pair]], least: int
) -> None:
    """MPT under FSDP on 8 to 512 GPUs, BERT under DDP on 1 to 256."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    error = np.abs([pair.error for pair in read(shared_data)])
    assert len(error) >= least
    assert np.median(error) <= 0.10
    assert np.quantile(error, 0.9) <= 0.20


def test_what_joins_two_cards_joins_no_more() -> None:
    assert own_link(devices().device("H100-NVL")) == parse_link("pcie5")
    assert own_link(devices().device("A100")) == parse_link("nvlink3")
    assert own_link(devices().device("L4")) == parse_link("pcie4")
    assert own_link(devices().device("MI300X")).text == "Infinity Fabric 4"


# ---------------------------------------------------------------- plans


JOB = """kind: ddltool.job
name: j
model: zoo:cifarnet
max_workers: 16
batch_size: 8
cluster: cluster.yaml
network: links
devices: [{type: V100, capability_per_s: 50}]
"""
NODES = "kind: ddltool.cluster\nnodes: [{name: n, count: 2, devices: {type: V100, count: 8}, %s}]\n"


def test_placement_weighs_nodes_by_their_links(cli: Cli, tmp_path: Path) -> None:
    """Slow cards keep the job on one node, fast ones let it have both; the step is the timeline's."""
    (tmp_path / "job.yaml").write_text(JOB)
    found = {}
    for nic in ("nic_gbit: 0.05", "nic: 8x200Gbit"):
        (tmp_path / "cluster.yaml").write_text(NODES % nic)
        found[nic] = cli("plan", tmp_path / "job.yaml", "--strategy", "est", "--json").document
    slow, fast = found.values()
    assert (slow["network"]["num_nodes"], fast["network"]["num_nodes"]) == (1, 2)
    assert fast["iteration_s"] < slow["iteration_s"] == pytest.approx(2 / 50, rel=0.05)
    (tmp_path / "cluster.yaml").write_text(NODES.replace(", %s", ""))
    cli("plan", tmp_path / "job.yaml", "--strategy", "est").refuses("job.yaml:network: links need a graph and links")


def test_eight_of_one_node_are_not_behind_ethernet(cli: Cli, tmp_path: Path) -> None:
    """The same bandwidth between nodes: 8 A100 of a node leave next to nothing exposed, 8 on their own nearly all."""
    job = JOB.replace("cluster: cluster.yaml\nnetwork: links\n", "").replace("max_workers: 16", "max_workers: 8")
    exposed = {}
    for per_node in ("", ", per_node: 1"):
        (tmp_path / "job.yaml").write_text(job.replace("{type: V100,", f"{{type: A100, count: 8{per_node},"))
        result = cli("plan", tmp_path / "job.yaml", "--bandwidth", "1Gbit", "--json")
        [on_all] = (each for each in result.document["decision"]["baselines"].values() if each["devices"]["A100"] == 8)
        exposed[per_node] = on_all["communication_s"]
        assert ("8 a node on NVLink 3 (240 GB/s) are assumed" in result.err) == (per_node == "")
    assert exposed[""] < 0.05 * exposed[", per_node: 1"]


def test_latency_between_nodes_is_the_cards_own_where_cards_are_named() -> None:
    """50 us go with a rate, or with nothing; cards have NCCL's hops, which only a larger --latency replaces."""
    assert fabric_of(None, gpus_per_node=1).between == Link(kind="plain", bytes_per_s=1.25e9, latency_s=50e-6)
    assert fabric_of(None, gpus_per_node=1, bandwidth="1Gbit").between == Link(
        kind="plain", bytes_per_s=0.125e9, latency_s=50e-6
    )
    assert fabric_of(None, gpus_per_node=1, latency="0s").between.latency_s == 0.0
    fabrics = [fabric_of(None, gpus_per_node=1, nic="200Gbit", latency=latency) for latency in (None, "1us", "50us")]
    assert fabrics[0].between == parse_nic("200Gbit")
    by_card, short, long = (fabric.over(4).all_reduce_s(8.0) for fabric in fabrics)
    assert by_card == short < long


def test_predictions_take_links_and_logs(cli: Cli, tmp_path: Path) -> None:
    """Faster cards and a log of a slow network show in the step."""
    log = tmp_path / "nccl.log"
    log.write_text(LOG.replace("85.58", "8558.0").replace("9187.8", "918700.0"))

    def sync(*more: object) -> float:
        command = ["predict", "zoo:cifarnet", "--device", "A100", "--batch-sizes", 8, "--replicas", 16, "--json", *more]
        return float(cli(*command).document["rows"][0]["sync_time_s"])

    cards, measured = sync("--nic", "8x200Gbit"), sync("--nic", "8x200Gbit", "--nccl-tests", log)
    assert cards < sync("--bandwidth", "1Gbit")
    assert measured > 10 * cards
    assert sync("--nic", "8x200Gbit", "--link", "pcie3") > cards
    refused = cli("predict", "zoo:cifarnet", "--device", "A100", "--nic", "1Gbit", "--bandwidth", "1Gbit")
    assert refused.error_line == "--nic: does not go with --bandwidth; cards by datasheet, or a rate as measured"


def test_a_plan_says_what_compression_brings(cli: Cli, tmp_path: Path) -> None:
    job = JOB.replace("cluster: cluster.yaml\nnetwork: links\n", "").replace("V100,", "V100, count: 8, per_node: 1,")
    (tmp_path / "job.yaml").write_text(job)
    found = cli("plan", tmp_path / "job.yaml", "--bandwidth", "10Gbit", "--compress", "bf16", "--json").document
    assert found["compressed"]["sent_bytes"] == found["compressed"]["uncompressed_bytes"] / 2
    assert found["compressed"]["saved"] > 0
    assert "bf16 would send" in found["compressed"]["verdict"]
    refused = cli("plan", tmp_path / "job.yaml", "--compress", "bf16")
    assert refused.error_line.startswith("--compress: nothing is known of the gradients and their network")
