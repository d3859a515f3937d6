"""``ddltool diff-run A B``: the first tensor in which two recorded training runs differ, and what is likely to blame."""

from __future__ import annotations

from pathlib import Path

from ddltool.commands.output import print_json, say
from ddltool.errors import CheckFailed
from ddltool.results import RunDifference


def diff_run(
    a: Path,
    b: Path,
    whole: bool = False,
    as_json: bool = False,
) -> None:
    """Compare two recorded training runs bit by bit; exit 1 names the first step, worker and tensor that differ.

    Records are written by ElasticTrainer(record=...) and RunRecorder.
    """
    from ddltool.runtime.elastic.run_difference import compare_runs  # the package imports torch

    found = compare_runs(a, b)
    if as_json:
        print_json(found)
    else:
        for line in _lines(found, str(a), str(b)):
            say(line)
    if found.difference is not None:
        raise CheckFailed(str(found.difference))
    if whole and not found.same_length:
        cut = " and ".join(str(path) for path, seen in ((a, found.a), (b, found.b)) if seen.cut)
        rest = f"{cut} ends in the middle of a line" if cut else "only one of them has the others"
        raise CheckFailed(f"{a} and {b} are equal in {found.steps_compared} steps, but {rest}")


def _lines(found: RunDifference, a: str, b: str) -> list[str]:
    lines = []
    if (difference := found.difference) is None:
        lines.append(f"equal bits in all {found.steps_compared} steps that both records have")
        if not found.same_length:
            for name, seen in ((a, found.a), (b, found.b)):
                ending = ", then a line that is cut off" if seen.cut else ""
                lines.append(f"  {name}: steps {seen.first_step} to {seen.last_step} ({seen.steps_read}){ending}")
    else:
        who = "all workers share it" if difference.worker is None else f"logical worker {difference.worker}"
        counts = ", ".join(f"{count} x {kind}" for kind, count in difference.differing_in_step.items())
        lines += [
            f"first difference: step {difference.step} (epoch {difference.epoch}), {who}",
            f"  tensor   {difference.record}: {difference.tensor}",
            f"  class    {difference.cause_class}",
            f"  cause    {difference.cause}",
            f"  before   {found.steps_compared - 1} steps with equal bits, and all that comes earlier in this one",
            f"  in step  {counts} differ",
        ]
    return lines + [f"settings differ: {one.name} is {one.a} in {a} and {one.b} in {b}" for one in found.settings]
