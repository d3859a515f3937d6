"""State on the host: bytes by hand, copies that hide behind compute or do not, and the host's update by its memory's speed."""

from __future__ import annotations

import functools

import pytest

from ddltool.analyzers.step.communication.fsdp import Unit, simulate_fsdp
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.memory import Recomputation
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.offloading import HOST_BYTES_PER_S, HostCopies, host_link_bytes_per_s, host_update_s
from ddltool.analyzers.step.costs.predict import predict
from ddltool.analyzers.step.costs.setting import Placement, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import WorkCurve, measure_work
from ddltool.errors import InputError
from ddltool.links import parse_link
from ddltool.shipped import calibration, devices
from tests.helpers.sharding_workers import gpt

LAYERS, SAMPLES = 4, 2
FABRIC = Fabric(inside=parse_link("nvlink3"), between=parse_link("pcie3"), gpus_per_node=4)


@functools.cache
def work() -> WorkCurve:
    return measure_work(lambda: gpt(LAYERS, SAMPLES))


def parameter_bytes() -> int:
    return sum(4 * each.numel() for each in gpt(LAYERS, SAMPLES).module.parameters())


def block_bytes() -> int:
    return sum(4 * each.numel() for each in gpt(LAYERS, SAMPLES).module.layers[0].parameters())  # type: ignore[union-attr, index]


@pytest.mark.parametrize("shard", [1, 2, 4])
def test_hosts_keep_what_devices_no_longer_do(shard: int) -> None:
    """Adam in float32: a parameter, a gradient and two moments, 16 bytes of each number, over the processes that share them."""
    lifetimes = work().lifetimes(SAMPLES)
    on_device, on_host = (Sharding(kind="fsdp", shard=shard, on_host=sharers) for sharers in (0, shard))
    assert lifetimes.host_bytes(on_device, "adam", lifetimes.sizes()) == 0
    assert lifetimes.host_bytes(on_host, "adam", lifetimes.sizes()) == 4 * parameter_bytes()
    assert (
        lifetimes.host_bytes(Sharding(kind="fsdp", shard=4, on_host=2), "adam", lifetimes.sizes())
        == 2 * parameter_bytes()
    )
    held = {}
    for sharding in (on_device, on_host):
        each = lifetimes.held(Recomputation(lifetimes, {}), sharding, "adam", lifetimes.sizes())
        held[sharding.on_host] = each.curves(), each.peak().curve
    curves, curve = held[shard]
    assert "parameters" not in curves
    assert "optimizer" not in curves
    # When the step ends the device has what lies outside the blocks: gathered parameters and their gradients.
    outside = parameter_bytes() - LAYERS * block_bytes()
    assert curve[-1] - curves["activations"][-1] == pytest.approx(2 * outside, rel=1e-6)
    # In the first forward pass the device is without its part of the state, and has a copied part of a block beside.
    first = lifetimes.blocks[0].first
    part = (parameter_bytes() * 3 - block_bytes()) / shard
    assert held[0][1][first] - curve[first] == pytest.approx(part, rel=1e-3)


def test_a_sum_of_several_passes_is_on_the_host() -> None:
    lifetimes = work().lifetimes(SAMPLES)
    once, summed = (
        lifetimes.peak(Sharding(kind="fsdp", shard=2, on_host=2, sums=sums), "adam").total_bytes
        for sums in (False, True)
    )
    assert once == summed


def units(compute_s: float) -> tuple[Unit, list[Unit]]:
    return Unit("", 0.0, 0.0, 0.0, 0.0), [Unit(f"{k}", 8e6, 16e6, compute_s, 2 * compute_s) for k in range(5)]


@pytest.mark.parametrize("shard", [1, 2])
def test_copies_are_exposed_where_there_is_nothing_to_hide_them(shard: int) -> None:
    """Without compute all copies follow one another; with much of it the first and the last block's are left."""
    alone = FABRIC.over(1)
    group = HostCopies(group=alone, shard=shard, bytes_per_s=1e9, kept_share=2.0)
    in_s, out_s = 16e-3 / shard, 16e-3 / shard  # kept twice as wide as they are gathered
    assert simulate_fsdp(*units(0.0), group, 1, 1).step_s == pytest.approx(5 * (2 * in_s + out_s))
    assert simulate_fsdp(*units(0.0), group, 1, 1, reshard=False).step_s == pytest.approx(5 * (in_s + out_s))
    assert simulate_fsdp(*units(1.0), group, 1, 1).exposed_s == pytest.approx(in_s + out_s)
    assert HostCopies.around(alone, Sharding(kind="fsdp"), [], 1.0) is alone


def test_links_to_the_host_are_those_of_the_generation() -> None:
    rates = {name: host_link_bytes_per_s(devices().device(name)) / 1e9 for name in ("V100", "A100", "H100", "GB200")}
    assert rates == pytest.approx({"V100": 11.97, "A100": 23.94, "H100": 47.88, "GB200": 342.0})


@pytest.mark.parametrize(("replicas", "passes"), [(1, 1), (4, 1), (4, 3)])
def test_the_host_updates_at_the_speed_of_its_memory(replicas: int, passes: int) -> None:
    """Fused Adam reads four numbers and writes three of each parameter; four processes of a node share its memory."""
    model = cost_model(devices().device("A100"), calibration())
    setting = Setting(fabric=FABRIC, optimizer="adam", sharding="fsdp:cpu", accumulation=passes)
    timed = work().timed(SAMPLES, model, setting)
    sharding = setting.sharded(replicas)
    assert sharding.on_host == replicas
    python_s = float(timed.meta["update_host_s"])  # type: ignore[arg-type]
    assert host_update_s(timed, sharding) - python_s == pytest.approx(7 * parameter_bytes() / HOST_BYTES_PER_S)
    [row], [on_device] = (
        predict(work(), model, each, [SAMPLES], [Placement(num_nodes=1, num_replicas=replicas)])
        for each in (setting, Setting(fabric=FABRIC, optimizer="adam", sharding="fsdp", accumulation=passes))
    )
    assert row.peak_memory_bytes < on_device.peak_memory_bytes
    # No step is shorter than its copies, which 23.94 GB/s carry, and the update that follows.
    copied_bytes = passes * 3 * LAYERS * block_bytes() / replicas
    assert row.step_time_s > copied_bytes / 23.94e9 + 7 * parameter_bytes() / HOST_BYTES_PER_S


def test_what_cannot_be_on_the_host_is_refused() -> None:
    with pytest.raises(InputError, match="--sharding: 'ddp:cpu' shards no parameters; give fsdp:cpu"):
        Sharding.named("ddp:cpu", 4)
    with pytest.raises(InputError, match="--optimizer: muon is not known to update on a host; give adamw"):
        Setting(fabric=FABRIC, optimizer="muon", sharding="fsdp:cpu")
    assert Sharding.named("hsdp:2:cpu", 4) == Sharding(kind="hsdp", shard=2, on_host=4)
