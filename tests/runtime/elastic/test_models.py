"""What models, datasets and extras may bring along: plain state, buffers in copies, compiled modules, signals."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddltool.errors import InputError
from ddltool.runtime.elastic import checkpoint as elastic_checkpoint
from ddltool.runtime.elastic import contexts
from ddltool.runtime.elastic.trainer import ElasticTrainer
from ddltool.runtime.processes import stopping
from ddltool.runtime.processes.digests import digest, leaves
from tests.helpers.elastic_workers import on
from tests.helpers.processes import message_of


class Net(nn.Module):
    """A normalised layer that keeps what ``habit`` says."""

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.last = nn.Linear(6, 3)
        self.habit = habit
        self.calls = 0
        self.shape: tuple[int, ...] | None = None
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        if self.habit == "counts":
            self.calls += 1
        if self.habit == "counts below":
            self.body[0].seen = getattr(self.body[0], "seen", 0) + 1
        if self.habit == "toggles":
            self.calls = not self.calls
        if self.habit == "notes the shape":
            self.shape = tuple(inputs.shape)
        if self.habit == "is ready":
            self.ready = True
        if self.habit == "has a buffer":
            self.counted = self.counted + 1
            hidden = hidden * self.counted
        if self.habit == "counts late" and float(self.counted.add_(1)) > 2:
            self.calls += 1
        logits: Tensor = self.last(hidden)
        return logits


def trainer_of(model: nn.Module, samples: int = 64, **options: Any) -> ElasticTrainer:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(samples, 4, generator=generator), torch.randint(3, (samples,), generator=generator)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"max_workers": 4, "batch_size": 2} | options
    return ElasticTrainer(model, optimizer, nn.CrossEntropyLoss(), data, **options)


def net(habit: str = "") -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net(habit)


def state_of_workers(path: str, habit: str) -> dict[str, str]:
    """Train three steps and save; return the bits of what each logical worker has of its own."""
    torch.set_num_threads(1)
    trainer = trainer_of(net(habit))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in trainer.epoch(0):
            if step.number == 3:
                break
    with trainer.evaluating() as model, torch.no_grad():
        model(torch.zeros(2, 4))  # leaves no trace
    trainer.save(path)
    return {name: value for name, value in saved_bits(Path(path)).items() if name.startswith("workers")}


@pytest.mark.parametrize("habit", ["counts", "counts below", "toggles", "notes the shape", "has a buffer"])
def test_what_turns_leave_in_attributes_is_the_workers_own(habit: str, tmp_path: Path) -> None:
    (alone,) = on(1, state_of_workers, str(tmp_path / "alone.pt"), habit)
    assert on(2, state_of_workers, str(tmp_path / "two.pt"), habit)[0] == alone
    own = {name.split("attributes.")[1]: value for name, value in alone.items() if "workers.2.attributes" in name}
    told = {"counts": ("calls", "3"), "counts below": ("body.0.seen", "3"), "toggles": ("calls", "True")}
    if habit in told:
        assert own == dict([told[habit]])
    elif habit == "notes the shape":
        assert own == {"shape.0": "2", "shape.1": "4"}


def test_turns_are_looked_at_ever_less_often() -> None:
    with mock.patch.object(contexts.WorkerState, "_attributes", autospec=True, return_value=()) as looks:
        for _ in trainer_of(net()).epoch(0):
            pass
    assert looks.call_count == 2 * len({1, 2, 3, 4, 8, 16, 32})


def averaged(path: str, options: dict[str, Any]) -> list[int]:
    """Train three steps with an average of the model, which copies its buffers; save; return the virtual ranks here."""
    torch.set_num_threads(1)
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    trainer = trainer_of(model, extras={"average": average}, **options)
    for step in trainer.epoch(0):
        average.update_parameters(model)
        if step.number == 3:
            break
    trainer.save(path)
    return list(trainer.processes.local)


def saved_bits(path: Path) -> dict[str, str]:
    content = elastic_checkpoint.read(path)
    return {
        name: digest(value) if isinstance(value, Tensor) else repr(value)
        for name, value in leaves({key: content[key] for key in ("parameters", "extras", "workers", "optimizer")})
    }


def test_extras_are_those_of_the_process_that_holds_virtual_rank_0(tmp_path: Path) -> None:
    (alone,) = on(1, averaged, str(tmp_path / "alone.pt"), {})
    assert alone == [0, 1, 2, 3]
    for placement, first in (((2, 2), 0), ((1, 3), 1)):
        path = tmp_path / f"{first}.pt"
        ranks = on(2, averaged, str(path), {"placement": placement})
        assert 0 in ranks[first]
        assert saved_bits(path) == saved_bits(tmp_path / "alone.pt"), placement


class Opaque:
    """Extras whose state only pickle could bring back."""

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass


def save_opaque(path: str, placement: tuple[int, ...] | None) -> str:
    trainer = trainer_of(net(), extras={"opaque": Opaque()}, placement=placement)
    return message_of(trainer.save, path)


def test_extras_that_cannot_be_read_back_are_refused_on_every_process(tmp_path: Path) -> None:
    for size, placement in ((1, None), (2, (1, 3))):
        for told in on(size, save_opaque, str(tmp_path / "run.pt"), placement):
            assert "what would be written cannot be read back" in told
            assert "keep to tensors, numbers, strings, lists and dicts" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("samples", "accumulation"), [(15, 2), (7, 1), (0, 1)])
def test_a_dataset_smaller_than_a_step_is_told_in_the_trainers_own_words(samples: int, accumulation: int) -> None:
    text = (
        f"dataset: has {samples} samples, one step takes max_workers x batch_size x accumulation = {8 * accumulation};"
        " give a smaller batch_size or max_workers"
    )
    with pytest.raises(InputError) as refused:
        trainer_of(net(), samples, accumulation=accumulation)
    assert str(refused.value) == text
    trainer_of(net(), 8 * accumulation, accumulation=accumulation)


def trained(path: Path, compiled: bool, until: int) -> dict[str, str]:
    torch.set_num_threads(1)
    model: nn.Module = net()
    if compiled:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    trainer = trainer_of(model, bucket_mib=1e-4)
    assert trainer.resume(path) == path.exists()
    for step in trainer.epoch(0):
        if step.number == until:
            break
    trainer.save(path)
    return saved_bits(path)


@pytest.mark.parametrize("compiled", [True, False], ids=["then as it is", "then compiled"])
def test_a_compiled_models_checkpoint_fits_the_model_as_it_is(compiled: bool, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole.pt", False, 4)
    trained(tmp_path / "run.pt", compiled, 2)
    assert trained(tmp_path / "run.pt", not compiled, 4) == whole
    assert not any("_orig_mod" in name for name in whole)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put the process's signal handlers back, whatever a test does to them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_termination_and_ctrl_c_ask_for_the_end_of_the_step(number: signal.Signals, handlers: None) -> None:
    trainer = trainer_of(net())
    trainer.stop_on()
    stops = []
    for step in trainer.epoch(0):
        stops.append(step.stop)
        if step.number == 2:
            signal.raise_signal(number)
            signal.raise_signal(number)  # the terminal and the launcher send the same Ctrl-C
    assert stops == [False, False, True, True, True, True, True, True]


def test_a_second_ctrl_c_ends_at_once(handlers: None) -> None:
    trainer = trainer_of(net())
    trainer.stop_on()
    signal.raise_signal(signal.SIGINT)
    with mock.patch.object(stopping, "SAME_CTRL_C_S", -1.0), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)


def test_other_signals_can_be_chosen(handlers: None) -> None:
    trainer = trainer_of(net())
    trainer.stop_on(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert next(trainer.epoch(0)).stop
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
