"""``ddltool diff-run A B``: the first tensor in which two recorded training runs differ, and its likely cause."""

from __future__ import annotations

from pathlib import Path

from ddltool.commands.output import print_json, say
from ddltool.errors import CheckFailed
from ddltool.results import RunDifference


def diff_run(a: Path, b: Path, whole: bool = False, as_json: bool = False) -> None:
    """Compare two recorded training runs bit by bit; exit 1 names the first step, worker and tensor that differ.

    ``a`` and ``b``: records, as ElasticTrainer(record=...) and RunRecorder write them. ``whole``: also fail if one record
    has steps that the other lacks. Raises CheckFailed if they differ.
    """
    from ddltool.runtime.elastic.run_difference import compare_runs  # the package imports torch

    comparison = compare_runs(a, b)
    if as_json:
        print_json(comparison)
    else:
        for line in _lines(comparison, str(a), str(b)):
            say(line)
    if comparison.difference is not None:
        raise CheckFailed(str(comparison.difference))
    if whole and not comparison.same_length:
        cut_files = " and ".join(str(path) for path, record in ((a, comparison.a), (b, comparison.b)) if record.cut)
        reason = f"{cut_files} ends in the middle of a line" if cut_files else "only one of them has the others"
        raise CheckFailed(f"{a} and {b} are equal in {comparison.steps_compared} steps, but {reason}")


def _lines(comparison: RunDifference, a: str, b: str) -> list[str]:
    """Return the lines to print about a comparison of two records.

    They say the first difference with its likely cause, or the number of equal steps; then the settings that differ. ``a`` and
    ``b``: the names of the records.
    """
    lines = []
    difference = comparison.difference
    if difference is None:
        lines.append(f"equal bits in all {comparison.steps_compared} steps that both records have")
        if not comparison.same_length:
            for name, record in ((a, comparison.a), (b, comparison.b)):
                ending = ", then a line that is cut off" if record.cut else ""
                lines.append(f"  {name}: steps {record.first_step} to {record.last_step} ({record.steps_read}){ending}")
    else:
        owner = "all workers share it" if difference.worker is None else f"logical worker {difference.worker}"
        counts = ", ".join(f"{count} x {kind}" for kind, count in difference.differing_in_step.items())
        lines += [
            f"first difference: step {difference.step} (epoch {difference.epoch}), {owner}",
            f"  tensor   {difference.record}: {difference.tensor}",
            f"  class    {difference.cause_class}",
            f"  cause    {difference.cause}",
            f"  before   {comparison.steps_compared - 1} steps with equal bits, and all that comes earlier in this one",
            f"  in step  {counts} differ",
        ]
    return lines + [
        f"settings differ: {setting.name} is {setting.a} in {a} and {setting.b} in {b}"
        for setting in comparison.settings
    ]
