"""Which of the precisions, optimizers and LoRA ranks that the user named is best. Start at :func:`best_of`.

Others are never tried, because they change how the model trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from ddltool.analyzers.job.planning.options import Goal
from ddltool.decision import LEAST_GAIN, Named, Option
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job
from ddltool.plans import Plan
from ddltool.units import counted, show_money, show_seconds

_MOST = 12


def combinations(
    precisions: Sequence[str | None], optimizers: Sequence[str | None], ranks: Sequence[int | None]
) -> list[dict[str, str | int | None]]:
    """Return every combination of the named values, each as fields of a job; a value of None means the job's default.

    Raises InputError for more than twelve combinations.

    >>> combinations(["bf16", "fp8"], [None], [None])[1]
    {'precision': 'fp8', 'optimizer': None, 'lora': None}
    """
    fields = ("precision", "optimizer", "lora")
    found = [dict(zip(fields, values, strict=True)) for values in product(precisions, optimizers, ranks)]
    if len(found) > _MOST:
        raise InputError("--precision", f"makes {len(found)} plans with --optimizer and --lora", "name at most 12")
    return found


def best_of(jobs: Sequence[Job], planned: Callable[[Job], Plan], goal: Goal) -> tuple[Job, Plan]:
    """Return the best of several jobs that differ in their numerics, and its plan, whose decision compares them all.

    Numerics are precision, optimizer and LoRA rank. ``planned`` makes the plan of a job. A later job counts as better, by
    ``goal``, only if it is so by more than ``LEAST_GAIN``. A plan without a decision is returned without the comparison.
    Raises the first job's Infeasible where none has a plan.
    """
    outcomes: list[Plan | Infeasible] = []  # by job
    for job in jobs:
        try:
            outcomes.append(planned(job))
        except Infeasible as error:
            outcomes.append(error)
    costs = [_cost(outcome, goal) if isinstance(outcome, Plan) else math.inf for outcome in outcomes]
    best = 0
    for place, cost in enumerate(costs):
        if isinstance(outcomes[best], Infeasible) or cost < costs[best] * (1 - LEAST_GAIN):
            best = place
    plan = outcomes[best]
    if isinstance(plan, Infeasible):
        first = outcomes[0]
        assert isinstance(first, Infeasible)
        raise first
    if plan.decision is None:
        return jobs[best], plan
    names = list(_names(jobs))
    rows = [
        Named(
            name=names[place],
            option=_option(outcome) if isinstance(outcome, Plan) else None,
            saves=0.0 if math.isinf(costs[place]) else 1 - costs[best] / costs[place],
            why_not=str(outcome).split("; ")[0] if isinstance(outcome, Infeasible) else "",
        )
        for place, outcome in sorted(enumerate(outcomes), key=lambda each: (each[0] != best, costs[each[0]]))
    ]
    first_sentence, *others = plan.decision.words
    first_sentence = f"With {names[best]}: {first_sentence[0].lower()}{first_sentence[1:]}"
    words = [first_sentence, *others, _sentence(rows, goal)]
    decision = plan.decision.model_copy(update={"words": words, "named": rows})
    return jobs[best], plan.model_copy(update={"decision": decision})


def _option(plan: Plan) -> Option | None:
    """Return the option that a plan's decision picked; None for a plan without a decision."""
    if plan.decision is None:
        return None
    picked = [option for option in plan.decision.options if not option.why_not]  # only the picked one has no reason
    return (picked or plan.decision.options)[0]


def _cost(plan: Plan, goal: Goal) -> float:
    """Return the number by which plans are compared, lower is better: bytes, the goal's value, or seconds of a step."""
    option = _option(plan)
    if option is None:
        return plan.iteration_s
    if goal.objective == "least-memory" and option.memory_bytes is not None:
        return option.memory_bytes
    return goal.value(option)


def _names(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield a name of each job, made of the numerics in which the jobs differ: ``bf16, LoRA 16`` or ``bf16, full``."""
    differing = [
        field for field in ("precision", "optimizer", "lora") if len({getattr(job, field) for job in jobs}) > 1
    ]
    for job in jobs:
        parts = [str(getattr(job, field)) for field in differing if field != "lora"]
        if "lora" in differing:
            parts.append(f"LoRA {job.lora}" if job.lora else "full")
        yield ", ".join(parts)


def _sentence(rows: Sequence[Named], goal: Goal) -> str:
    """Return the sentences that compare the named numerics by step time (or price); the picked one is the first of ``rows``.

    ``saves`` of a row: share of its cost that the picked numerics save.
    """
    texts = []
    for row in rows:
        if row.option is None:
            texts.append(f"{row.name}: {row.why_not or 'no plan'}")
            continue
        text = f"{row.name}: {show_seconds(row.option.iteration_s)}"
        if goal.objective == "cheapest" and row.option.price_per_sample is not None:
            text = f"{row.name}: {show_money(row.option.price_per_sample * 1e6)} per 1M samples"
        if row is not rows[0]:
            # if the picked ones save a share s of this row's cost, this row costs s / (1 - s) more than they do
            more = row.saves / (1 - row.saves) if row.saves < 1 else math.inf
            text = f"{text}, {abs(more):.0%} {'more' if more >= 0 else 'less'}"
        texts.append(text)
    first = {"fastest": "the fastest step has", "cheapest": "cheapest is"}.get(goal.objective, "best is")
    return f"You named {counted(len(rows), 'choice')}; {first} {rows[0].name}. {'; '.join(texts)}."
