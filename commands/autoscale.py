"""``ddltool simulate --autoscale`` and ``--hyperparameter-search``: one job on rented nodes, and trials on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.hyperparameter_search import Search
    from ddltool.analyzers.scheduling.simulator import Options, Policy

PUBLISHED = {"cost": -0.25, "seconds": 0.06}
"""Pollux, section 5.4.1: ImageNet, goodput against throughput."""
PUBLISHED_SEARCH = {"baseline_jct_s": 2040.0, "pollux_jct_s": 1500.0, "baseline_s": 50400.0, "pollux_s": 36000.0}
"""Pollux, Table 3: 100 trials of ResNet18 on CIFAR-10, two nodes with 8 A100 each."""


def autoscale_job(
    traces: Sequence[Path],
    application: str = "imagenet",
    *,
    gpus: int = 4,
    gpu_type: str = "any",
    most: int = 16,
    price_per_h: float = 1.0,
    upper: float = 2 / 3,
    lower: float = 1 / 2,
    restart_delay_s: float = 30.0,
    fixed: Sequence[int] = (1, 4, 16),
) -> dict[str, Any]:
    """Return the document (kind ``ddltool.autoscaling``): the goodput scaler, the throughput scaler, fixed clusters.

    ``most`` nodes of ``gpus`` GPUs can be rented; ``fixed``: numbers of nodes that are held throughout. Raises
    InputError for traces, nodes and thresholds that cannot be.
    """
    from ddltool.analyzers.scheduling.autoscale import CloudNode, ScalingRule, compare_rules
    from ddltool.commands.output import progress
    from ddltool.commands.workloads import read_applications

    node = CloudNode(gpus=gpus, gpu_type=gpu_type, most=most, price_per_h=price_per_h)
    rules = {
        "throughput": ScalingRule(rule="throughput", upper=upper, lower=lower),
        "goodput": ScalingRule(rule="goodput", upper=upper, lower=lower),
        **{f"fixed-{count}": ScalingRule(rule="fixed", nodes=count) for count in fixed if count <= most},
    }
    job = read_applications(traces, [application])[application]
    with progress(f"{application} under {len(rules)} scaling rules"):
        results = compare_rules(job, node, list(rules.values()), restart_delay_s=restart_delay_s)
    made = {}
    for name, result in zip(rules, results, strict=True):
        made[name] = {
            "seconds": result.seconds,
            "node_seconds": result.node_seconds,
            "cost": result.cost,
            "efficiency": result.efficiency,
            "restarts": result.restarts,
            "first_nodes": result.epochs[0].nodes,
            "last_nodes": result.epochs[-1].nodes,
            "epochs": [
                {
                    "begin_s": epoch.begin_s,
                    "seconds": epoch.seconds,
                    "nodes": epoch.nodes,
                    "batch_size": epoch.batch_size,
                    "efficiency": epoch.efficiency,
                }
                for epoch in result.epochs
            ],
        }
    return {
        "kind": "ddltool.autoscaling",
        "schema_version": 1,
        "application": application,
        "gpus_per_node": gpus,
        "most_nodes": most,
        "price_per_h": price_per_h,
        "upper": upper,
        "lower": lower,
        "restart_delay_s": restart_delay_s,
        "rules": made,
    }


def show_autoscaling(document: Mapping[str, Any]) -> None:
    """Print one row per rule, the changes against the throughput scaler, and the published ones."""
    from ddltool.commands.output import out, table

    rules = document["rules"]
    base = rules["throughput"]
    rows = [
        [
            name,
            f"{one['seconds'] / 3600:.2f}",
            f"{one['seconds'] / base['seconds'] - 1:+.0%}" if one is not base else "",
            f"{one['cost']:,.1f}",
            f"{one['cost'] / base['cost'] - 1:+.0%}" if one is not base else "",
            f"{one['efficiency']:.2f}",
            f"{one['first_nodes']}-{one['last_nodes']}",
            str(one["restarts"]),
        ]
        for name, one in rules.items()
    ]
    if document["application"] == "imagenet":
        rows.append(["published", "", f"{PUBLISHED['seconds']:+.0%}", "", f"{PUBLISHED['cost']:+.0%}", "", "", ""])
    columns = ("", "hours", "change", "cost", "change", "effic.", "nodes", "moves")
    title = f"{document['application']} on up to {document['most_nodes']} rented nodes (simulated)"
    out().print(
        table(
            title,
            columns,
            rows,
            caption="changes against the throughput scaler; effic.: statistical efficiency; moves: restarts",
        )
    )


def search_trials(
    traces: Sequence[Path],
    cluster: Path,
    search: Search,
    policies: Mapping[str, Callable[[], Policy]],
    options: Options,
    *,
    local_batch_sizes: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the document (kind ``ddltool.hyperparameter_search``): the baseline and each policy on the same search.

    ``local_batch_sizes``: further fixed batches per GPU at which the baseline runs, besides the search's own.
    """
    from dataclasses import asdict, replace

    from ddltool.analyzers.scheduling.hyperparameter_search import SearchResult, run_search
    from ddltool.commands.simulate_progress import replay_progress
    from ddltool.commands.workloads import read_applications, read_cluster

    machines = read_cluster(cluster)
    applications = read_applications(traces, [search.application])
    found: dict[str, SearchResult] = {}

    def run(name: str, one: Search, policy: Policy | None) -> None:
        with replay_progress(name, one.trials) as on_round:
            found[name] = run_search(one, applications, machines, policy, options, on_round)

    for size in dict.fromkeys([search.local_batch_size, *local_batch_sizes]):
        run(f"fixed-{size}", replace(search, local_batch_size=size), None)
    for name, make in policies.items():
        run(name, search, make())
    return {
        "kind": "ddltool.hyperparameter_search",
        "schema_version": 1,
        "search": asdict(search),
        "gpus": machines.total_gpus,
        "policies": {
            name: {
                "avg_jct_s": result.avg_jct_s,
                "makespan_s": result.makespan_s,
                "gpu_seconds": result.gpu_seconds,
                "restarts": result.restarts,
            }
            for name, result in found.items()
        },
    }


def show_search(document: Mapping[str, Any]) -> None:
    """Print one row per policy and what was published."""
    from ddltool.commands.output import out, table

    base = next(iter(document["policies"].values()))

    def change(one: Mapping[str, Any], name: str) -> str:
        return f"{one[name] / base[name] - 1:+.0%}" if one is not base else ""

    rows = [
        [
            name,
            f"{one['avg_jct_s'] / 60:.1f}",
            change(one, "avg_jct_s"),
            f"{one['makespan_s'] / 3600:.2f}",
            change(one, "makespan_s"),
            f"{one['gpu_seconds'] / 3600:,.0f}",
            str(one["restarts"]),
        ]
        for name, one in document["policies"].items()
    ]
    known = PUBLISHED_SEARCH
    published = {
        "published baseline": ("baseline_jct_s", "baseline_s"),
        "published pollux": ("pollux_jct_s", "pollux_s"),
    }
    if document["search"]["application"] == "cifar10":
        for name, (jct, span) in published.items():
            changes = (
                f"{known[jct] / known['baseline_jct_s'] - 1:+.0%}",
                f"{known[span] / known['baseline_s'] - 1:+.0%}",
            )
            jct_text, span_text = f"{known[jct] / 60:.0f}", f"{known[span] / 3600:.0f}"
            first = name.endswith("baseline")
            rows.append([name, jct_text, "" if first else changes[0], span_text, "" if first else changes[1], "", ""])
    search = document["search"]
    title = f"{search['trials']} trials of {search['application']}, {search['concurrent']} at a time (trials synthetic)"
    columns = ("", "JCT, min", "change", "span, h", "change", "GPU h", "moves")
    caption = (
        f"changes against a fixed {search['local_batch_size']} samples on each of {search['gpus']} GPUs; "
        "span: from the first trial to the end of the last; moves: restarts"
    )
    out().print(table(title, columns, rows, caption=caption))
