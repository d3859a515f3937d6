"""Ordered transfers between real processes: same bits under every order, the enforced order, and every way to fail."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddltool.errors import InputError
from ddltool.runtime.servers import Meeting
from ddltool.runtime.servers.transfers import TransferPlan, planned_priority
from tests.helpers import transfer_workers as bodies
from tests.helpers.transfer_workers import SGD, launch, make_batch, make_model, make_plan, results, trained_alone

STEPS = 4
NAMES = [name for name, _ in make_model().named_parameters()]


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_trained_bits_are_those_of_one_process_under_every_order(workers: int, servers: int) -> None:
    alone = trained_alone(STEPS, lambda step: [(worker, step) for worker in range(workers)])
    for order in ("none", "random", "reversed", "given") if servers == 1 else ("random", "given"):
        found = results(launch(bodies.train, workers + servers, workers, servers, order, STEPS))
        plan = make_plan(workers, servers, order)
        for worker in range(workers):
            weights, arrivals = found[worker]
            for name in NAMES:
                assert weights[name].tobytes() == alone[name].tobytes(), (order, name)
            check_arrivals(plan, worker, arrivals)
        for versions in found[workers:]:
            assert set(versions.values()) == {STEPS}


def test_a_compiled_model_leaves_the_wire_alone() -> None:
    alone = trained_alone(STEPS, lambda step: [(0, step)])
    (weights, of_the_worker, traced), _ = results(launch(bodies.train_compiled, 2, STEPS))
    assert all(weights[name].tobytes() == alone[name].tobytes() for name in NAMES)
    assert of_the_worker == []
    assert traced


def check_arrivals(plan: TransferPlan, worker: int, pulls: list[list[Any]]) -> None:
    """Assert that every pull came in the enforced order on each channel, in the version that was due."""
    assert len(pulls) == STEPS + 1
    for number, arrivals in enumerate(pulls):
        assert {arrival.version for arrival in arrivals} == {number}
        times = [arrival.time_s for arrival in arrivals]
        assert sorted(arrival.name for arrival in arrivals) == sorted(NAMES)
        assert min(times) > 0
        for server in range(plan.servers):
            came = [arrival.name for arrival in arrivals if arrival.server == server]
            assert came == [NAMES[index] for index in plan.queue(server, worker, number)]


@pytest.mark.parametrize("how", ["clip", "scale one", "another"])
def test_a_gradient_that_changes_while_it_is_pushed_is_refused(how: str) -> None:
    """Its memory is being sent: what would arrive is part of the old and part of the new."""
    worker, server = launch(bodies.train_changing, 2, how, "ready", 2)
    assert worker.error.startswith("InputError: worker.step: ")
    assert ".grad was changed after the backward pass, while it was being pushed; clip and scale" in worker.error
    assert "InputError" in server.error


@pytest.mark.parametrize("how", ["clip", "two"])
def test_gradients_pushed_at_the_end_of_a_step_are_those_after_clipping(how: str) -> None:
    """The oracle is torch's own SGD on one process, bit for bit."""
    worker, server = launch(bodies.train_changing, 2, how, "step", 3)
    assert (worker.error, server.error) == ("", "")
    model = bodies.make_model()
    optimizer = torch.optim.SGD(model.parameters(), **SGD, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2 if how == "two" else 1):
            features, labels = make_batch(part, step)
            nn.functional.cross_entropy(model(features), labels).backward()
        bodies.change(model, how)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, value in model.named_parameters():
        assert worker.result[name].tobytes() == value.detach().numpy().tobytes(), name


def test_gradients_may_be_forgotten_after_the_backward_pass() -> None:
    plain, forgotten = (launch(bodies.train_changing, 2, how, "ready", 2)[0] for how in ("", "forget"))
    assert (plain.error, forgotten.error) == ("", "")
    for name, value in plain.result.items():
        assert forgotten.result[name].tobytes() == value.tobytes()


def test_values_change_in_memory_in_the_enforced_order(tmp_path: Path) -> None:
    """The worker watches its parameters turn from NaN to values, with no word from the protocol."""
    (watched, recorded), enforced = (outcome.result for outcome in launch(bodies.serve_slowly, 2, "reversed", tmp_path))
    assert watched == [{name} for name in enforced]
    assert recorded == enforced
    assert enforced != NAMES


def test_random_orders_differ_by_worker_and_pull_and_repeat_with_the_seed() -> None:
    plan, again = (make_plan(3, 1, "random") for _ in range(2))
    orders = {key: plan.queue(0, *key) for key in itertools.product(range(3), range(10))}
    assert orders == {key: again.queue(0, *key) for key in orders}
    assert len(set(orders.values())) == 30, "two of 30 draws of 8! orders are equal once in 90 seeds"
    assert all(sorted(order) == list(range(8)) for order in orders.values())


def test_equal_priorities_make_one_total_order_per_channel() -> None:
    priority = dict.fromkeys(NAMES, 4) | {NAMES[-1]: 0}
    plan = TransferPlan.for_model(make_model(), workers=1, servers=1, priority=priority)
    assert [NAMES[index] for index in plan.queue(0, 0, 0)] == [NAMES[-1], *NAMES[:-1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"priority": {NAMES[0]: 0}}, "transfer plan:priority: misses body.0.bias, body.2.bias, body.2.weight and 4"),
        ({"priority": dict.fromkeys([*NAMES, "heads.2.weight"], 0)}, "has unknown heads.2.weight; it must name each"),
        ({"priority": dict.fromkeys(NAMES, 0), "random_seed": 1}, "has both priorities and a random seed"),
        ({"workers": 0}, "0 workers and 1 servers"),
    ],
)
def test_what_a_plan_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        TransferPlan.for_model(make_model(), **({"workers": 1, "servers": 1} | changes))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("workers", "servers", "trouble", "culprit", "text"),
    [
        (2, 1, "kill", 1, "worker 1 (rank 1)"),
        (2, 2, "kill", 3, "server 1 (rank 3)"),
        (2, 1, "raise", 1, "worker 1 (rank 1) left a step with ValueError: a bad batch"),
        (1, 2, "raise", 2, "server 1 (rank 2) failed: ValueError: a bad batch"),
        (2, 1, "leave", 1, "from worker 1 (rank 1), which has closed"),
    ],
)
def test_when_one_process_fails_the_others_end_with_its_name(
    workers: int, servers: int, trouble: str, culprit: int, text: str
) -> None:
    outcomes = launch(bodies.train_with_trouble, workers + servers, workers, servers, trouble, culprit, 60.0)
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            assert outcome.exit_code == (-9 if trouble == "kill" else 0)
            continue
        assert outcome.error.startswith("TransferError: "), outcome
        assert "\n" not in outcome.error
        assert outcome.exit_code == 0
        assert text in outcome.error, outcome.error


def test_another_policy_needs_two_methods() -> None:
    """Worker 0 takes five steps while worker 1 waits for its end, and every gradient counts."""
    quick, slow, versions = (outcome.result for outcome in launch(bodies.train_one_by_one, 3, 5))
    assert quick == [0, 1, 2, 3, 4]
    assert slow == [5]
    assert set(versions.values()) == {6}


def test_a_missing_gradient_ends_the_run_with_the_names_of_both() -> None:
    """Worker 1 withholds one gradient: worker 0's first parameter waits for it, and all others behind the counter."""
    outcomes = launch(bodies.stall_in_the_middle, 3, 2, 3.0)
    told, waits = outcomes[2].error.split(", and others waited for it: ")
    assert re.match(r"TransferError: server 0 \(rank 2\): worker 1 \(rank 1\) was silent for \d", told)
    assert waits == (
        "body.0.weight for worker 0 (rank 0) (body.0.bias, body.2.weight, body.2.bias and 4 more wait behind it) "
        "waits for its gradient of step 0 from worker 1 (rank 1)"
    )
    for worker in outcomes[:2]:
        assert waits in worker.error
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 0]


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("order on ranks 1 and 2", "transfer plan: differs from rank 0's on ranks 1, 2; give every rank the same plan"),
        ("more servers", "transfer plan: is for 2 workers and 2 servers, but this job runs 3 processes; start 4"),
        ("push on rank 0", "push: is late; known: ready, step"),
        (
            "shape on rank 2",
            "transfer plan: was made from another model: heads.1.bias, heads.1.weight are not the same",
        ),
    ],
)
def test_all_ranks_refuse_a_plan_that_one_does_not_share(case: str, line: str) -> None:
    outcomes = launch(bodies.connect, 3, case)
    for outcome in outcomes:
        assert outcome.error.startswith("InputError: ")
        assert line in outcome.error


@pytest.mark.parametrize("case", ["missing", "another token"])
def test_who_does_not_come_is_named_within_the_limit(case: str) -> None:
    """A process with another token is no part of the job, and is told no more than that nobody answers it."""
    outcomes = launch(bodies.meet, 3, case)
    line = "server 0 (rank 2): worker 1 (rank 1) did not come within 2 s"
    assert outcomes[0].error == outcomes[2].error == f"TransferError: {line}"
    if case == "another token":
        assert "has, for 2 s, not answered at 127.0.0.1:" in outcomes[1].error


def test_a_server_listens_at_the_given_interface_alone() -> None:
    _, server = launch(bodies.listening, 2)
    assert server.result == ["127.0.0.1"]


def test_a_process_without_a_job_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "DDLTOOL_SERVER", "DDLTOOL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="RANK and MASTER_ADDR: are not set, so this process has no job"):
        Meeting.of_environment()
    monkeypatch.setenv("DDLTOOL_SERVER", "10.0.0.7:29600")
    with pytest.raises(InputError, match="DDLTOOL_TOKEN: is not set; give all processes of the job the same secret"):
        Meeting.of_environment()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(InputError, match="RANK: is 'one'; start the job with torchrun"):
        Meeting.of_environment()


def test_modules_of_torch_that_use_their_childrens_weights_wait_for_them() -> None:
    outcomes = launch(bodies.use_unseen, 2, False)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    output, expected = outcomes[0].result
    assert output == expected


def test_weights_that_nothing_waits_for_are_refused() -> None:
    outcomes = launch(bodies.use_unseen, 2, True)
    assert "InputError: model: uses last.weight without calling the module that owns it" in outcomes[0].error
    assert "uses last.weight" in outcomes[1].error


def test_priorities_come_from_the_enforcement_config(tmp_path: Path) -> None:
    """What `ddltool emit` writes is what the transfers take; a plan without a graph says what is missing."""
    from ddltool.artifacts import save
    from ddltool.plans import Enforcement, ParameterRecord, RankEnforcement

    records = [ParameterRecord(name=name, size_bytes=4, priority=place) for place, name in enumerate(("b", "a"))]
    made = Enforcement(
        job="job",
        strategy="bsp",
        world_size=1,
        total_batch_size=1,
        ranks=[RankEnforcement(rank=0, device_type="cpu", ests=0, local_batch_size=1)],
        parameters=records,
    )
    save(made, tmp_path / "enforce.json")
    assert planned_priority(tmp_path / "enforce.json") == {"b": 0, "a": 1}
    save(made.model_copy(update={"parameters": []}), tmp_path / "bare.json")
    with pytest.raises(InputError, match="hold no priority; make the plan with --graph"):
        planned_priority(tmp_path / "bare.json")
