"""The goodput agent: what it trains is what plain training of the same batches gives, and its noise scale is the true one."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddltool.analyzers.job.goodput.elastic_table import Split
from ddltool.analyzers.job.goodput.throughput import goodput_per_s
from ddltool.analyzers.job.goodput.tuning import BatchLimits
from ddltool.errors import InputError
from ddltool.runtime.agent import choosing
from ddltool.runtime.agent.agent import GoodputAgent
from ddltool.runtime.agent.choosing import FULL_STEP, PASS, BatchDecision, StepTimeHistory, decide
from ddltool.runtime.agent.noise_sampling import affordable_interval
from ddltool.telemetry import TelemetryRow
from tests.helpers import agent_workers as workers
from tests.helpers.runtime_workers import crew

ROOT = Path(__file__).resolve().parents[3]
CHANGES = {0: (60, 0), 2: (35, 1), 3: (101, 2), 5: (48, 0)}


def reference(steps: list[dict[str, Any]], samples: int) -> torch.Tensor:
    """Return the parameters that plain SGD reaches with the batches and learning rates that were used."""
    images, targets, _ = workers.digits(samples).tensors
    model = workers.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 ** step["epoch"] * step["factor"]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[step["indices"]]), targets[step["indices"]]).backward()
        optimizer.step()
    return workers.vector(model)


def check_epochs(steps: list[dict[str, Any]], samples: int, epochs: int) -> None:
    """Every sample of every epoch came exactly once."""
    for epoch in range(epochs):
        used = [index for step in steps if step["epoch"] == epoch for index in step["indices"]]
        assert sorted(used) == list(range(samples))


@pytest.mark.parametrize("ranks", [2, 1])
def test_training_is_that_of_the_whole_batches(ranks: int) -> None:
    """Uneven shares, accumulation, changes in mid-epoch, a learning-rate schedule: plain SGD all the same.

    The single rank has a loader with workers, which fetch ahead.
    """
    options = {"interval_steps": 4, "workers": 2 if ranks == 1 else 0}
    if ranks == 2:
        made = crew().run(workers.train_two, 301, 5, CHANGES, options)
        torch.testing.assert_close(made[0]["vector"], made[1]["vector"], rtol=0, atol=0)
        assert made[0]["changes"] == made[1]["changes"]
    else:
        made = [workers.train_two(0, 301, 5, CHANGES, options)]
    steps = workers.gather([rank["steps"] for rank in made])
    check_epochs(steps, 301, 5)
    changes = made[0]["changes"]
    assert [(total, passes) for _, total, passes in changes] == list(CHANGES.values())
    # A look comes after steps 4, 8, ...; only what workers fetched ahead keeps its size.
    late = [step - 4 * (look + 1) for (step, *_), look in zip(changes, CHANGES, strict=True)]
    assert late == [0] * 4 if ranks == 2 else max(late) > 0
    starts = {first: total for first, total, _ in changes}
    total = 24
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        total = starts.get(step["step"], total)
        ends = following is None or following["epoch"] != step["epoch"]
        assert len(step["indices"]) == total or (ends and len(step["indices"]) < total)
        assert step["factor"] == pytest.approx(max(1.0, len(step["indices"]) / 24))
        assert step["lr"] == pytest.approx(0.05 * 0.5 ** (step["epoch"] + ends))  # never compounded
    torch.testing.assert_close(made[0]["vector"], reference(steps, 301), rtol=1e-4, atol=1e-6)


def test_two_one_two_processes_by_restart() -> None:
    """Each part continues with the batch, the rate and the samples of the last, in the middle of an epoch."""
    options = {"interval_steps": 3, "stop_at": 7}
    first = crew().run(workers.train_two, 340, 4, {0: (60, 0), 1: (35, 1)}, options)
    state = first[0]["state"]
    place = workers.opened(state)["agent"]["sampler"]
    assert (place["position"], place["total_batch_size"]) == (3 * 24 + 3 * 60 + 35, 35)
    second = workers.train(0, 340, 4, {1: (50, 0)}, interval_steps=3, stop_at=15, checkpoint=state)
    state = second["state"]
    third = crew().run(workers.train_two, 340, 4, {}, {"interval_steps": 3, "checkpoint": state})
    parts = [workers.gather([made["steps"] for made in part]) for part in (first, [second], third)]
    assert len(parts[1][0]["indices"]) == 35  # 18 + 17 on two ranks before, 35 in 1 pass now
    assert len(parts[2][0]["indices"]) == 50
    assert parts[1][0]["factor"] == pytest.approx(35 / 24)
    steps = [step for part in parts for step in part]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    check_epochs(steps, 340, 4)
    torch.testing.assert_close(third[0]["vector"], reference(steps, 340), rtol=1e-4, atol=1e-6)
    assert third[0]["progress"] == pytest.approx(4 * 340 / 24)  # the linear rule counts samples


def exact_noise_scale(samples: int, adam: bool) -> float:
    """Brute force: the gradient of every single sample.

    The data set is itself a sample: with trace S of the covariance (unbiased), its mean has ``|G|^2 + S / N``. Batches
    drawn without replacement know nothing of the S / N, so it is taken off.
    """
    images, targets, _ = workers.digits(samples).tensors
    model = workers.network()
    scale = 1 / (
        (torch.cat([workers.adam_moment(p).flatten() for p in model.parameters()]) / (1 - 0.999**7)).sqrt() + 1e-3
    )
    rows = []
    for image, target in zip(images, targets, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(image[None]), target[None]).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        rows.append((gradient * scale if adam else gradient).double())
    gradients = torch.stack(rows)
    variance = float(gradients.var(dim=0).sum())
    return variance / (float(gradients.mean(dim=0).square().sum()) - variance / samples)


@pytest.mark.slow
@pytest.mark.parametrize("adam", [False, True])
def test_noise_scale_on_digits_within_ten_percent_of_all_samples(adam: bool) -> None:
    """From two replicas, from accumulation, and from consecutive steps; the norms pass through DDP's buckets."""
    exact = exact_noise_scale(640, adam)
    assert (abs(exact / exact_noise_scale(640, False) - 1) > 0.2) == adam  # another question
    replicas = crew().run(workers.frozen_noise, 640, 32, 1, adam, 60)
    assert replicas[0] == replicas[1]
    found = [replicas[0], workers.frozen_noise(0, 640, 32, 1, adam, 60)]
    if not adam:
        found.append(workers.frozen_noise(0, 640, 16, 8, adam, 80))
    for noise_scale, error in found:
        assert error < 0.08
        assert noise_scale == pytest.approx(exact, rel=0.10)


def job(tmp_path: Path | None = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, GoodputAgent]:
    """Return model, optimizer and agent of one process."""
    return workers.build(workers.digits(300), 0.05, 0.0, **options)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, agent: GoodputAgent, epochs: int = 1) -> None:
    for epoch in range(epochs):
        for inputs, answers, _ in agent.batches(epoch):
            agent.loss(nn.functional.cross_entropy(model(inputs), answers)).backward()
            if agent.complete:
                optimizer.step()
                optimizer.zero_grad()


def test_real_decisions_stay_within_the_limits() -> None:
    """Nothing scripted: measured times, fits in the background, batches that double at most."""
    model, optimizer, agent = job(
        interval_steps=5, background=True, smoothing=0.5, noise_every=1, max_batch_size=150, max_local_batch_size=40
    )
    run(model, optimizer, agent, epochs=20)
    agent.close()
    assert agent.changes
    tried = 24
    for _, total, accumulation in agent.changes:
        assert 24 <= total <= min(150, 2 * tried)
        assert total <= 40 * (accumulation + 1)
        tried = max(tried, total)
    assert agent.noise_scale is not None
    assert len(agent._chooser.times) > 1


@pytest.mark.parametrize("background", [False, True])
def test_a_failing_fit_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no\nconvergence")

    monkeypatch.setattr(choosing, "decide", broken)
    model, optimizer, agent = job(interval_steps=2, background=background)
    with caplog.at_level(logging.WARNING):
        run(model, optimizer, agent, epochs=3)
        agent.close()
    assert [record.getMessage() for record in caplog.records] == [
        "goodput agent: the fit failed (no convergence); the present batch stays"
    ]
    assert agent.total_batch_size == 24
    assert agent.sampler.step == 3 * 13


def test_norms_that_fail_are_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("ddltool.runtime.agent.noise_sampling.squared_norm", broken)
    model, optimizer, agent = job(interval_steps=2, noise_every=1)
    with caplog.at_level(logging.WARNING):
        run(model, optimizer, agent)
    assert len(caplog.records) == 1
    assert agent.sampler.position == 300


def test_off_and_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off: plain training of the initial batch. Hold: measured and decided, never changed."""
    monkeypatch.setenv("DDLTOOL_OFF", "1")
    monkeypatch.setattr(choosing.Chooser, "look", None)  # not even called
    model, optimizer, agent = job(interval_steps=2)
    run(model, optimizer, agent)
    off = workers.vector(model)
    assert len(agent._chooser.times) == 0
    monkeypatch.undo()
    monkeypatch.setenv("DDLTOOL_HOLD", "1")
    with workers.scripted({0: (48, 0)}):
        model, optimizer, agent = job(interval_steps=2)
        run(model, optimizer, agent)
    assert agent.decision is None or not agent.changes
    assert agent.changes == []
    assert len(agent._chooser.times) == 1
    torch.testing.assert_close(workers.vector(model), off, rtol=0, atol=0)


def test_telemetry_has_a_row_per_step(tmp_path: Path) -> None:
    file = tmp_path / "telemetry.jsonl"
    with workers.scripted({0: (90, 2)}):
        model, optimizer, agent = job(interval_steps=4, telemetry=file, max_local_batch_size=30)
        run(model, optimizer, agent)
    agent.close()
    rows = [TelemetryRow.model_validate_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [row.step for row in rows] == list(range(len(rows)))
    assert [(row.total_batch, row.passes) for row in rows] == [(24, 1)] * 4 + [(90, 3)] * 2 + [(24, 1)]
    assert sum(row.batch for row in rows) == 300
    assert rows[5].learning_rate_factor == pytest.approx(90 / 24)
    assert all(0 < row.compute_s <= row.step_s + 1e-3 for row in rows)


def test_state_that_is_none_is_refused_and_nothing_taken() -> None:
    model, optimizer, agent = job(interval_steps=4)
    run(model, optimizer, agent)
    good = agent.state_dict()
    bad: list[tuple[Any, str]] = [
        (None, "agent state: is none of version 1"),
        ({}, "agent state: is none of version 1"),
        ({**good, "initial_batch_size": 5}, "agent state:initial_batch_size: is 5; this job has 24"),
        ({key: value for key, value in good.items() if key != "progress"}, "agent state: cannot be read"),
        ({**good, "observations": torch.tensor([[1.0, math.nan, 1, 1, 1]])}, "observations:row 0: is"),
        ({**good, "estimator": {}}, "noise scale state: lacks"),
        ({**good, "sampler": {**good["sampler"], "seed": 9}}, "sampler state:seed: is 9; this job has 0"),
        ({**good, "sampler": {**good["sampler"], "position": 301}}, "sampler state:position: is 301"),
    ]
    model, optimizer, fresh = job(interval_steps=4)
    run(model, optimizer, fresh)
    before = str(fresh.state_dict())
    for state, message in bad:
        with pytest.raises(InputError, match=message):
            fresh.load_state_dict(state)
        assert str(fresh.state_dict()) == before
    fresh.load_state_dict(good)
    assert str(fresh.state_dict()) == str(good)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overhead": 0.0}, "overhead: is 0.0; give a number above 0"),
        ({"interval_s": math.nan}, "interval_s: is nan"),
        ({"interval_steps": 0}, "interval_steps: is 0"),
        ({"noise_every": -1}, "noise_every: is -1"),
        ({"min_gain": math.inf}, "min_gain: is inf"),
        ({"rule": "linaer"}, 'rule: "linaer" is not known; did you mean "linear"'),
        ({"initial_batch_size": 0}, "initial_batch_size: is 0"),
        ({"initial_batch_size": 300, "max_batch_size": 200}, "initial_batch_size: is 300"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        job(**options)


@pytest.mark.parametrize("counts", [(3.0, None), (None, 3.0)])
def test_a_count_in_some_passes_of_a_step_is_refused(counts: tuple[float | None, ...]) -> None:
    """The gradients of all passes are divided by all counts, so a pass without one would have another weight."""
    model, _, agent = job(max_local_batch_size=12)  # two passes
    batches = agent.batches(0)
    inputs, answers, _ = next(batches)
    agent.loss(nn.functional.cross_entropy(model(inputs), answers), count=counts[0]).backward()
    inputs, answers, _ = next(batches)
    loss = nn.functional.cross_entropy(model(inputs), answers)
    with pytest.raises(InputError, match="backward: was given a count in some passes of a step only; give it in all"):
        agent.loss(loss, count=counts[1])
    assert agent.complete  # told before the step's update


def test_a_loop_that_goes_around_the_agent_is_told() -> None:
    model, optimizer, agent = job(max_local_batch_size=12)  # two passes
    batches = agent.batches(0)
    next(batches)
    with pytest.raises(InputError, match=r"optimizer.step: came before the step's last pass"):
        optimizer.step()
    model, optimizer, agent = job()
    batches = agent.batches(0)
    inputs, answers, _ = next(batches)
    with pytest.raises(InputError, match=r"optimizer.step: came before the pass's backward"):
        optimizer.step()
    agent.loss(nn.functional.cross_entropy(model(inputs), answers)).backward()
    optimizer.step()
    batches.close()
    with pytest.raises(InputError, match="dataset: is only a number"):
        next(
            iter(
                GoodputAgent(
                    model, optimizer, 300, initial_batch_size=8, max_batch_size=8, max_local_batch_size=8
                ).batches(0)
            )
        )


def test_sampling_pays_its_share() -> None:
    """The dearer a sample beside a step, the rarer it is; exactly at the budget."""
    for cost, step, share in ((1e-3, 0.05, 0.004), (5e-3, 1e-3, 0.004), (1e-6, 1.0, 0.004)):
        every = affordable_interval(cost, step, share)
        assert cost / every <= step * share * (1 + 1e-9) or every == 1000
        assert every == 1 or cost / (every - 1) > step * share
    assert affordable_interval(1.0, 1e-6, 0.01) == 1000
    assert affordable_interval(math.nan, 1.0, 0.01) == 1


def test_the_decision_is_the_best_of_all_within_what_was_explored() -> None:
    """Brute force over every local batch and number of passes, under the fitted model."""
    times, present = StepTimeHistory(), Split(world_size=2, total_batch_size=32, accumulation_steps=0)
    for batch in (8, 16, 24):
        for _ in range(5):
            times.add(1, 2, batch, FULL_STEP, 0.05 + 0.001 * batch)
            times.add(1, 2, batch, PASS, 0.02 + 0.001 * batch)
    limits = BatchLimits(initial_batch_size=32, max_batch_size=4096, max_local_batch_size=100)

    def ask(tried: int, noise_scale: float | None = 2000.0, min_gain: float = 0.05) -> BatchDecision | None:
        return decide(times, 1, present, limits, noise_scale=noise_scale, largest_tried=tried, min_gain=min_gain)

    for tried in (32, 60, 200, 4096):
        made = ask(tried)
        assert made is not None
        best = max(
            float(goodput_per_s(made.params, 1, 2, m, s, noise_scale=2000.0, initial_batch_size=32))
            for m in range(1, 49)  # local batches up to 24 were tried
            for s in range(60)
            if 32 <= 2 * m * (s + 1) <= min(2 * tried, 4096)
        )
        assert made.goodput_per_s == pytest.approx(best, rel=1e-9)
        assert made.split.total_batch_size <= 2 * tried
    small, large = ask(32), ask(4096)
    assert small is not None
    assert large is not None
    assert small.split.total_batch_size == 64  # as far as it may go; there is more beyond
    assert large.split.total_batch_size > 64
    stay = ask(32, min_gain=10.0)
    assert stay is not None
    assert stay.split == present
    assert ask(32, noise_scale=None) is None
