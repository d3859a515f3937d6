"""Who holds the others up: the section of ``ddltool stragglers``."""

from __future__ import annotations

from functools import partial

from ddltool.analyzers.reporting.figures import Bars, Span, Spans, merged
from ddltool.analyzers.reporting.section import Blocks, Column, Picture, Section, pictured, some, tabled
from ddltool.results import RankSplit, StragglersResult
from ddltool.units import show_seconds

_RANKS_DRAWN = 16


def stragglers_section(found: StragglersResult, name: str) -> Section:
    """Return the section: the verdict, each finding, where the ranks' steps go, and their timeline."""
    lead = [found.verdict, *(finding.sentence for finding in found.findings[1:])]
    share = "" if found.m_w is None else f"; the slowest 3 % of the ranks explain {found.m_w:.0%} of that (M_W)"
    lead.append(
        f"A step takes {show_seconds(found.step_s)}, {found.slowdown:.3f} times the "
        f"{show_seconds(found.ideal_step_s)} of equal ranks (slowdown S){share}."
    )
    blocks: Blocks = []
    if found.splits:
        blocks.append(_splits(found))
    if found.classes:
        rows = sorted((*found.classes.items(), *found.stages.items(), *found.workers.items()), key=lambda row: -row[1])
        columns = {"operations": "0", "alone": "1:.3f"}
        blocks.append(tabled("What the slowdown is of", "predicted", rows, columns))
    return Section(title=f"Stragglers: {name}", lead=[*lead, *found.remarks], blocks=blocks)


def _splits(found: StragglersResult) -> Picture:
    columns: dict[str, Column[RankSplit]] = {"step": "step_s", "waiting": "wait_s", "if median": "step_if_median_s"}
    columns |= {part: partial(_part, part) for part in found.splits[0].parts_s}
    columns["exposed"] = "exposed_s"
    names = ("rank", [str(row.rank) for row in found.splits])
    spare = ("optimizer", "exposed", "host", "input")
    table = tabled("Where the ranks' steps go", "measured", found.splits, columns, names=names, spare=spare)
    if found.timeline:
        drawn = found.timeline[:_RANKS_DRAWN]
        whole = max((span[1] for one in drawn for span in one.spans), default=0.0)
        lanes = [(one.rank, merged([Span(*span) for span in one.spans], whole)) for one in drawn]
        figure = Spans(lanes=lanes, title="What each rank did")
        return pictured(f"The first steps, on one clock.{some(_RANKS_DRAWN, found.timeline, 'ranks')}", table, figure)
    rows = [(f"rank {row.rank}", row.wait_s) for row in found.splits[:_RANKS_DRAWN]]
    bars = Bars(rows=rows, xlabel="waiting in a step", title="Waiting by rank", seconds=True)
    return pictured(f"Who waits: a straggler does not.{some(_RANKS_DRAWN, found.splits, 'ranks')}", table, bars)


def _part(name: str, row: RankSplit) -> str:
    return show_seconds(row.parts_s[name])
