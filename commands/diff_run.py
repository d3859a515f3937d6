"""``ddltool diff-run A B``: the first tensor in which two recorded training runs differ, and what is likely to blame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddltool.commands.options import Json
from ddltool.commands.output import out, print_json
from ddltool.errors import CheckFailed
from ddltool.results import DifferingSetting, FirstDifference, RunDifference, RunSeen

if TYPE_CHECKING:
    from ddltool.runtime.elastic.run_difference import Comparison, Seen


def diff_run(
    a: Annotated[Path, typer.Argument(metavar="A", help="A record of steps (.jsonl, .jsonl.gz).", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    whole: Annotated[
        bool, typer.Option("--whole", help="Records of different length or steps count as different, too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two recorded training runs bit by bit; exit 1 names the first step, worker and tensor that differ.

    Records are written by ElasticTrainer(record=...) and RunRecorder.
    """
    from ddltool.runtime.elastic.run_difference import compare_runs

    found = compare_runs(a, b)
    if as_json:
        print_json(as_result(found))
    else:
        _show(found, str(a), str(b))
    if found.difference is not None:
        raise CheckFailed(str(found.difference))
    if whole and not found.same_length:
        cut = " and ".join(str(path) for path, seen in ((a, found.a), (b, found.b)) if seen.cut)
        rest = f"{cut} ends in the middle of a line" if cut else "only one of them has the others"
        raise CheckFailed(f"{a} and {b} are equal in {found.common} steps, but {rest}")


def as_result(found: Comparison) -> RunDifference:
    """Return a comparison as the command's result."""
    first = found.difference
    return RunDifference(
        equal=first is None,
        same_length=first is None and found.same_length,
        steps_compared=found.common,
        a=_seen(found.a),
        b=_seen(found.b),
        settings=[DifferingSetting(name=name, a=one, b=other) for name, one, other in found.settings],
        difference=None
        if first is None
        else FirstDifference(
            step=first.step,
            epoch=first.epoch,
            worker=first.worker,
            record=first.kind,
            tensor=first.tensor,
            cause_class=first.cause_class,
            cause=first.cause,
            differing_in_step=dict(first.differing),
        ),
    )


def _seen(seen: Seen) -> RunSeen:
    return RunSeen(steps_read=seen.steps, first_step=seen.first, last_step=seen.last, cut=seen.cut)


def _show(found: Comparison, a: str, b: str) -> None:

    lines = []
    difference = found.difference
    if difference is None:
        lines.append(f"equal bits in all {found.common} steps that both records have")
        for name, seen in ((a, found.a), (b, found.b)):
            ending = ", then a line that is cut off" if seen.cut else ""
            if not found.same_length:
                lines.append(f"  {name}: steps {seen.first} to {seen.last} ({seen.steps}){ending}")
    else:
        who = "all workers share it" if difference.worker is None else f"logical worker {difference.worker}"
        lines += [
            f"first difference: step {difference.step} (epoch {difference.epoch}), {who}",
            f"  tensor   {difference.kind}: {difference.tensor}",
            f"  class    {difference.cause_class}",
            f"  cause    {difference.cause}",
            f"  before   {found.common - 1} steps with equal bits, and all that comes earlier in this one",
            "  in step  " + ", ".join(f"{count} x {kind}" for kind, count in difference.differing.items()) + " differ",
        ]
    lines += [f"settings differ: {name} is {one} in {a} and {other} in {b}" for name, one, other in found.settings]
    for line in lines:
        out().print(line, soft_wrap=True)
