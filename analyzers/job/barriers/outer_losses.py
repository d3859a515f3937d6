"""Published losses of training on islands (DiLoCo) relative to data-parallel training: figures as printed, no promise.

Every entry is a training run of a decoder-only language model with AdamW as the inner and Nesterov momentum as the outer
optimizer, on as many tokens as the data-parallel run. Start at :func:`published`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Factors up to which a published setting counts as similar: inner steps, islands, parameters.
_LIKE_STEPS, _LIKE_ISLANDS, _LIKE_MODELS = 2.0, 4.0, 4.0


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """The evaluation loss of a published run on islands."""

    parameters: float
    islands: int
    every: int
    """Inner steps between outer steps."""
    change: float
    """Loss on islands over that of data-parallel training, minus 1."""
    source: str
    """Paper and table."""


_LAWS = "arXiv 2503.09799, Tables 4 and 5"
_STREAMING = "arXiv 2501.18512, Tables 1 and 5"
_DILOCO = "arXiv 2311.08105, Table 2"
# Charles et al. 2025: C4, 20 tokens a parameter, H = 30; percent for 1, 2, 4 and 8 islands.
_BY_ISLANDS = {
    35e6: (-0.1, 0.7, 2.0, 3.9),
    90e6: (-0.1, 0.5, 1.5, 3.1),
    180e6: (-0.2, 0.3, 1.1, 2.3),
    335e6: (-0.3, 0.1, 0.9, 2.0),
    550e6: (-0.3, 0.2, 0.7, 1.7),
    1.3e9: (-0.4, 0.2, 0.5, 1.3),
    2.4e9: (-0.4, -0.1, 0.3, 1.1),
    4e9: (-0.22, -0.18, 0.18),
    10e9: (-0.19, -0.19, 0.29),
}
# Douillard et al. 2025: 2 islands, fragments of three layers, 4 bits, overlapped, H = 100: loss of data parallel training
# and of theirs, on C4 (20 tokens a parameter), and of 1B on Dolma with 25, 100 and 250 billion tokens.
_STREAMED = (
    *((35e6, 3.51, 3.56), (100e6, 3.19, 3.22), (200e6, 2.97, 3.00), (300e6, 2.80, 2.83), (500e6, 2.67, 2.69)),
    *((1e9, 2.49, 2.50), (4e9, 2.25, 2.26), (1e9, 2.67, 2.66), (1e9, 2.52, 2.51), (1e9, 2.45, 2.45)),
)
# Douillard et al. 2023: 150M, 8 islands, H = 500, a perplexity of 15.02: against 15.30 of a batch 8 times as large, and 14.72
# of 8 times the updates.
_PERPLEXITY, _OTHERS = 15.02, (15.30, 14.72)

MEASURED = (
    *(
        MeasuredLoss(size, 2**place, 30, percent / 100, _LAWS)
        for size, row in _BY_ISLANDS.items()
        for place, percent in enumerate(row)
    ),
    *(MeasuredLoss(size, 2, 100, theirs / others - 1, _STREAMING) for size, others, theirs in _STREAMED),
    *(MeasuredLoss(150e6, 8, 500, math.log(_PERPLEXITY) / math.log(other) - 1, _DILOCO) for other in _OTHERS),
)


def published(parameters: float, islands: int, every: float) -> list[MeasuredLoss]:
    """Return the published runs that are most similar to a setting; [] where there is none.

    Similar runs have half to twice the inner steps ``every``, one to four times the islands, and a quarter to four times the
    parameters. Of these only the runs with the nearest number of islands are returned. A model larger (or smaller) than all of
    them counts as the largest (or smallest).
    """
    like = [
        run
        for run in MEASURED
        if run.every / _LIKE_STEPS <= every <= run.every * _LIKE_STEPS
        and islands <= run.islands <= islands * _LIKE_ISLANDS
    ]
    if not like:
        return []
    nearest = min(run.islands for run in like)  # all have at least as many islands as asked for
    like = [run for run in like if run.islands == nearest]
    sizes = [run.parameters for run in like]
    size = min(max(parameters, min(sizes)), max(sizes))
    return [run for run in like if size / _LIKE_MODELS <= run.parameters <= size * _LIKE_MODELS]
