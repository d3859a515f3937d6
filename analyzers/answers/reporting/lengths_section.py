"""The section of distributing samples by length: the cost of padding and waiting, and the gain of each remedy.

A *remedy* is a way to distribute the samples of a global batch among ranks and passes.
"""

from __future__ import annotations

from ddltool.analyzers.answers.reporting.figures import Bars
from ddltool.analyzers.answers.reporting.section import Column, Section, Verdict, pictured, tabled
from ddltool.results import LengthsResult, RankLengths, RemedyFigures
from ddltool.units import counted, show_seconds

WORDS = {
    "padded": "padded, random order",
    "grouped": "padded, group_by_length",
    "sorted": "padded, sorted in the batch",
    "unpadded": "unpadded, random order",
    "lpt": "unpadded, LPT",
    "karmarkar_karp": "unpadded, Karmarkar-Karp",
    "cp_sat": "unpadded, CP-SAT",
    "window": "unpadded, outliers together",
    "cut": "cut to one length, no masks",
    "cut_masked": "cut to one length, masks",
}
"""What each way to share out global batches is called."""
_RANKS_SHOWN = 16


def lengths_section(result: LengthsResult, name: str) -> Section:
    """Return the section of distributing samples by length: the speed-up of each remedy, and the first batch by rank."""
    # The lead: what today wastes, the samples, the batches and their cost, and how sure the shares are.
    lengths = result.lengths
    cost = result.cost
    passes = (
        f"at most {result.max_tokens:,} tokens in a pass" if result.max_tokens else counted(result.accumulation, "pass")
    )
    verdict = _verdict(result)
    today = result.remedies[result.today]
    wasted = f"{today.padding_share:.0%} of the tokens are padding" if today.padding_share else "nothing is padded"
    lead = [
        f"Today ({WORDS[result.today]}) {wasted}, and ranks wait {today.waiting_share:.0%} of the time. {verdict.answer}",
        f"{lengths.samples:,} samples: median {lengths.median:,.0f} tokens, mean {lengths.mean:,.0f}, 99 % up to "
        f"{lengths.p99:,.0f}, longest {lengths.longest:,}.",
        f"{result.batches:,} global batches of {result.total_batch:,} on {counted(result.replicas, 'rank')}, {passes}; "
        f"a sample of L tokens costs {cost.per_token:.3g} L + {cost.per_square:.3g} L^2 + {cost.per_sample:.3g} "
        f"{'s' if cost.unit == 's' else 'tokens'} ({cost.source}).",
        f"Ranks' shares are within {result.gap:.2%} of the best on average, {result.largest_gap:.2%} at worst (proven). "
        f"{_order_sentence(result)}",
    ]
    labelled = {WORDS[way]: remedy for way, remedy in result.remedies.items()}

    def step(remedy: RemedyFigures) -> str:
        """Return a remedy's mean step: as a time, or as a number of tokens if that is the unit of the cost."""
        return show_seconds(remedy.step) if cost.unit == "s" else f"{remedy.step:,.0f}"

    columns: dict[str, Column[RemedyFigures]] = {
        "step": step,
        "speed-up": "speedup:.2f",
        "low": "speedup_low:.2f",
        "high": "speedup_high:.2f",
        "padding": "padding_share:.1%",
        "waiting": "waiting_share:.1%",
        "tokens in a pass": "most_tokens",
    }
    caption = f"Tokens per second over those of {WORDS[result.today]}, with the 95 % interval over batches"
    table = tabled(
        caption, "simulated", labelled.values(), columns, names=("way", labelled), spare=("step", "high", "low")
    )
    figure = Bars(
        rows=[(label, remedy.speedup) for label, remedy in labelled.items()],
        xlabel="speed-up",
        title="Speed-up by the way global batches are shared out",
        level=("today", 1.0),
        intervals=[(remedy.speedup_low, remedy.speedup_high) for remedy in labelled.values()],
    )
    rank_columns: dict[str, Column[RankLengths]] = {
        "samples": "samples",
        "tokens": "tokens",
        "cost": "cost:,.4g",
        "longest": _longest,
    }
    # One batch shows the effect; of many ranks only the first are listed.
    ranks = result.assignments[:_RANKS_SHOWN]
    first_batch = tabled(
        "The first global batch, by rank",
        "simulated",
        ranks,
        rank_columns,
        names=("rank", [str(rank.rank) for rank in ranks]),
    )
    picture = pictured("Speed-up by the way global batches are shared out.", table, figure)
    return Section(title=f"Lengths: {name}", lead=lead, blocks=[picture, first_batch], verdict=verdict)


def _longest(rank: RankLengths) -> int:
    """Return the tokens of a rank's longest sample; 0 for a rank without samples."""
    return max((length for each in rank.passes for length in each), default=0)


def _order_sentence(result: LengthsResult) -> str:
    """Return the sentence on how far the remedies change the random order of the samples."""
    sentence = "Batches keep their random order: only who computes a sample changes."
    if result.window == 1:
        return sentence
    return f"{sentence[:-1]}; 'outliers together' moves samples by less than {result.window} global batches."


def _verdict(result: LengthsResult) -> Verdict:
    """Return the verdict: the gain of the better remedy, sorting within padded batches or distributing unpadded ones."""
    # Only these two can be had by hook.dataloader.
    best = max(("sorted", "cp_sat"), key=lambda way: result.remedies[way].speedup)
    remedy = result.remedies[best]
    today = result.remedies[result.today]
    is_faster = remedy.speedup > 1
    words = WORDS[best][0].upper() + WORDS[best][1:]
    argument = "Lengths(lengths, padded=True)" if best == "sorted" else "lengths"
    return Verdict(
        answer=f"{words}: {remedy.speedup:.2f} times the tokens per second of {WORDS[result.today]}.",
        sure=f"simulated, {remedy.speedup_low:.2f} to {remedy.speedup_high:.2f} over batches; today {today.padding_share:.0%} "
        f"of the tokens are padding, and ranks wait {today.waiting_share:.0%} of the time",
        then=f"hook.dataloader(..., lengths={argument}) does it" if is_faster else "leave the batches as they are",
        good=is_faster,
    )
