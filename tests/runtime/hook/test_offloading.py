"""Activations on the host: the same training bit for bit, the bytes that were planned, and every use after its copy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddltool.analyzers.step.costs.memory import Recomputation
from ddltool.analyzers.step.costs.saving import Saving
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.errors import InputError
from ddltool.plans import Offloaded, Recomputed
from ddltool.runtime.hook import offloading
from ddltool.runtime.hook.offloading import offload_modules
from ddltool.runtime.hook.sharding import checkpoint_modules
from tests.helpers.runtime_workers import crew
from tests.helpers.sharding_workers import Gpt, allocated_bytes, gpt

AWAY = {"layers.0": "layers.1", "layers.1": "layers.3", "layers.2": "layers.3"}


def prepared(away: Mapping[str, str], keeps: Mapping[str, list[int]], layers: int = 5, backend: str = "") -> Gpt:
    torch.manual_seed(0)
    model = Gpt(layers=layers)
    for layer in model.layers if backend else ():
        layer.compile(backend=backend)
    checkpoint_modules(model, [Recomputed(module=name, keeps=kept) for name, kept in keeps.items()])
    offload_modules(model, [Offloaded(module=name, until=until) for name, until in away.items()])
    return model


def trained(model: Gpt, steps: int = 4) -> list[Tensor]:
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=0.01), torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(model.words_known, (4, model.length + 1), generator=generator)
        optimizer.zero_grad()
        model.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("keeps", [{}, {"layers.1": [], "layers.2": [0, 2]}, {f"layers.{k}": [] for k in range(5)}])
def test_training_is_the_same_bit_for_bit(keeps: Mapping[str, list[int]]) -> None:
    plain, away = trained(prepared({}, keeps)), trained(prepared(AWAY, keeps))
    assert all(map(torch.equal, plain, away))


def test_compiled_blocks_train_the_same_and_leave_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the backend that compiles without a compiler of C++, whose results are those of the model as it is."""
    left, free_device = list[int](), offloading._SavedStorages.free_device

    def counted(saved: offloading._SavedStorages) -> None:
        left.append(sum(content.nbytes for content in saved.on_host.values()))
        free_device(saved)

    monkeypatch.setattr(offloading._SavedStorages, "free_device", counted)
    plain = trained(prepared(AWAY, {}))
    by_eager_blocks, left[:] = list(left), []
    compiled = trained(prepared(AWAY, {}, backend="aot_eager"))
    assert all(map(torch.equal, plain, compiled))
    assert left == by_eager_blocks
    assert min(left) > 0


def test_what_leaves_is_what_the_forward_pass_saved_and_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plain block what it made and saved, by hooks of this test; of one that is computed again its input."""
    lifetimes = lifetimes_of(trace_step(lambda: gpt(4, 2), mode="training"))
    model, seen = Gpt(layers=4, width=128, length=64, words=512), dict[str, dict[int, Any]]()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def watched(name: str, module: nn.Module) -> None:
        forward, own = module.forward, seen.setdefault(name, {})

        def pack(tensor: Tensor) -> Tensor:
            own[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        def run(x: Tensor) -> Tensor:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                made: Tensor = forward(x)
            for tensor in (x, made):
                own.pop(tensor.untyped_storage().data_ptr(), None)
            return made

        module.forward = run

    tokens = torch.zeros(2, model.length, dtype=torch.long)
    for name, module in model.named_modules():
        if name.startswith("layers.") and name.count(".") == 1:
            watched(name, module)
    model(tokens)  # the graph is dropped, and the test's dictionaries hold what was saved
    sizes = lifetimes.sizes()
    on_host = frozenset(f"layers.{k}" for k in range(3))
    for saved_ops in ({}, {"layers.1": ()}):
        plan = Recomputation(lifetimes, Saving(saved_ops=saved_ops, on_host=on_host))
        planned = {name: sizes[own].sum() for name, own in zip(lifetimes.names, plan.copied, strict=True)}
        by_hand = {
            name: sum(t.untyped_storage().nbytes() for address, t in own.items() if address not in parameters)
            for name, own in seen.items()
        }
        by_hand |= dict.fromkeys(saved_ops, 2 * model.length * 128 * 4) | {"layers.3": 0}
        assert planned == pytest.approx(by_hand, abs=16)  # a GPU's attention saves the state of its random numbers, too
        left, free_device = list[int](), offloading._SavedStorages.free_device

        def counted(saved: offloading._SavedStorages, left: list[int] = left, free_device: Any = free_device) -> None:
            left.append(sum(content.nbytes for content in saved.on_host.values()))
            free_device(saved)

        monkeypatch.setattr(offloading._SavedStorages, "free_device", counted)
        hooked = Gpt(layers=4, width=128, length=64, words=512)
        checkpoint_modules(hooked, [Recomputed(module=name) for name in saved_ops])
        offload_modules(hooked, [Offloaded(module=f"layers.{k}", until=f"layers.{k + 1}") for k in range(3)])
        hooked.loss(hooked(tokens), tokens).backward()
        monkeypatch.undo()
        assert left == [by_hand[f"layers.{k}"] for k in range(3)]


@pytest.mark.parametrize(("window", "again"), [(1, False), (2, False), (1, True)])
def test_the_device_holds_what_is_predicted(window: int, again: bool) -> None:
    """As torch's profiler sees it: until the copies are awaited, and from where room is made on."""
    layers, samples = 6, 8
    lifetimes = lifetimes_of(trace_step(lambda: gpt(layers, samples), mode="training"))
    names = lifetimes.names
    saving = Saving(saved_ops=dict.fromkeys(names[:3] * again, ()), on_host=frozenset(names[:-window]), window=window)
    plain, ours = (lifetimes.peak(Sharding.named("ddp", 2), "momentum", each).total_bytes for each in ({}, saving))
    until = {entry.module: entry.until for entry in saving.offloaded(names)}
    seen = min(crew().run(allocated_bytes, "ddp", dict(saving.saved_ops), layers, samples, until))
    assert seen == pytest.approx(ours, rel=0.02)
    assert ours < 0.8 * plain


def test_every_use_waits_for_its_copy_and_every_room_for_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """With streams of this test: memory is given up and used only after compute was told to wait for the last copies."""
    told = list[tuple[str, Any]]()

    class CopyStreams(offloading._CopyStreams):
        def copying(self, device: torch.device, to_host: bool) -> AbstractContextManager[Any]:
            told.append(("begin", to_host))
            return nullcontext()

        def end_of_copies(self, device: torch.device, to_host: bool) -> Any:
            told.append(("end", len(told)))
            return told[-1][1]

        def hold_compute(self, device: torch.device, end: Any) -> None:
            if end is not None:
                told.append(("wait", end))

    monkeypatch.setattr(offloading, "_CopyStreams", CopyStreams)
    free_device, unpack = offloading._SavedStorages.free_device, offloading._SavedStorages.unpack
    checked = {"given up": 0, "used": 0}

    def checked_free_device(saved: offloading._SavedStorages) -> None:
        held = set(saved.on_device)
        free_device(saved)
        assert ("wait", saved.out_end) in told
        checked["given up"] += bool(held - set(saved.on_device))

    def checked_unpack(saved: offloading._SavedStorages, piece: Any) -> Tensor:
        made = unpack(saved, piece)
        if not isinstance(piece, Tensor) and piece.address in saved.on_host:
            assert ("wait", saved.back_end) in told
            checked["used"] += 1
        return made

    monkeypatch.setattr(offloading._SavedStorages, "free_device", checked_free_device)
    monkeypatch.setattr(offloading._SavedStorages, "unpack", checked_unpack)
    trained(prepared(AWAY, {}), steps=1)
    assert checked["given up"] == 3
    assert checked["used"] >= 3 * 10
    begun = [to_host for word, to_host in told if word == "begin"]
    assert begun == [True] * 3 + [False] * 3  # each leaves once, and comes back once, before it is used


def test_a_graph_may_be_used_twice_and_without_gradients_nothing_leaves() -> None:
    plain, away = prepared({}, {}), prepared(AWAY, {})
    tokens = torch.randint(64, (2, 16))
    for model in (plain, away):
        loss = model.loss(model(tokens), tokens)
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), away.parameters(), strict=True))  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(plain(tokens), away(tokens))


def test_unknown_modules_are_refused_and_nothing_changes() -> None:
    model = Gpt(layers=2)
    plan = [Offloaded(module="layers.0", until="layers.1"), Offloaded(module="layers.1", until="layers.9")]
    with pytest.raises(InputError, match=r"on_host: the model has no module 'layers\.9'; trace and plan this model"):
        offload_modules(model, plan)
    assert "forward" not in vars(model.layers[0])
