"""What all pictures share: colours, letters, widths and the way to SVG.

Colours are Okabe and Ito's, which people with colour blindness can tell apart; lines and text take the page's own
colour, so one picture serves light and dark pages. A picture that is shrunk to a phone's width cannot be read, and one
that scrolls hides its legend: :func:`at_both_widths` draws it once for each.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARGUMENTS = ParamSpec("_ARGUMENTS")
# The orange of bars is darker than Okabe and Ito's, which has a contrast of only 2.3 with white paper.
COMPUTE_COLOUR, WAIT_COLOUR = "#C98600", "#808080"
KIND_COLOURS: Mapping[str, str] = {"recv": "#0072B2", "compute": COMPUTE_COLOUR, "send": "#009E73"}
SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PHASE_COLOURS: Mapping[str, str] = {"compute": COMPUTE_COLOUR, "wait": WAIT_COLOUR, "sync": "#0072B2"}
# Drawn in this colour, then replaced by the page's own.
INK = "#010203"
WIDTH_IN = 8.0
# On a phone of 390 pixels that leaves letters of 11 pixels.
_NARROW_IN = 4.2
_width: ContextVar[float] = ContextVar("width of a picture in inches", default=WIDTH_IN)
# Letters on blue: the page lightens that blue, and darkens these letters, on dark paper.
ON_BLUE = "#fffffe"
# The page's paper, behind letters that stand on a line.
PAPER = "#fefffe"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "ddltool",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold dollars
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the factor and the name of a unit that keeps axis labels short."""
    if longest_s <= 0:
        return 1.0, "s"
    for factor, unit, least in ((1.0, "s", 1.0), (1e3, "ms", 1e-3)):
        if longest_s >= least:
            return factor, unit
    return 1e6, "us"


def width_in() -> float:
    """Return the width in inches at which a picture is to be drawn."""
    return _width.get()


def is_narrow() -> bool:
    """Return whether the picture is for a phone: legends then take fewer columns, names fewer letters."""
    return width_in() < WIDTH_IN


def at_both_widths(draw: Callable[_ARGUMENTS, str]) -> Callable[_ARGUMENTS, Callable[[], str]]:
    """Return what draws the picture, when somebody looks, twice: for a screen and for a phone; the page shows one."""

    @functools.wraps(draw)
    def with_data(*args: _ARGUMENTS.args, **options: _ARGUMENTS.kwargs) -> Callable[[], str]:
        def drawn() -> str:
            wide = draw(*args, **options)
            token = _width.set(_NARROW_IN)
            try:
                narrow = draw(*args, **options)
            finally:
                _width.reset(token)
            return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'

        return drawn

    return with_data


@contextmanager
def styled(height_in: float) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure of this height in the report's style, and its axis."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in(), height_in), layout="constrained")
        yield figure, figure.subplots()


def to_svg(figure: Figure, title: str) -> str:
    """Return the figure as an SVG element that scales with the page, titled for screen readers."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    # Of a picture's two widths one is hidden, and what is hidden lends nothing: each has hatches and clips of its own.
    with mpl.rc_context({"svg.hashsalt": f"ddltool {width_in():g}"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that no font here has: the reader's browser has its own
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Title": title})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1width="100%" role="img"', text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*pt" ', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", f"<title>{title}</title>", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # several pictures share a page, ids must not repeat
    return text.replace(INK, "currentColor")
