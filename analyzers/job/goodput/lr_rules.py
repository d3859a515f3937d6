"""How the learning rate follows the batch size: linear, square root, AdaScale, LEGW, as plug-ins by name.

Start at :func:`rule`. Write a rule as a subclass of :class:`LrRule` and add it with :func:`register`. With ``S = M / M0``,
the total batch over the batch that the learning rate was tuned for, a rule says by which factor the learning rate grows,
how long the warm-up is, and how many steps at M0 one step is worth (for schedules that count steps).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddltool.errors import InputError, did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientStatistics:
    """Statistics of a batch's gradient at batch size M0: squared norm of its mean (sqr), trace of its covariance (var).

    Both are in the same unit, whichever it is: rules use only their ratio. The noise scale in samples is ``M0 var / sqr``.
    """

    sqr: float
    var: float

    def __post_init__(self) -> None:
        """Raise InputError unless both are finite, 0 or more, and one of them above 0."""
        if not (min(self.sqr, self.var) >= 0 and 0 < self.sqr + self.var < math.inf):
            raise InputError("sqr, var", f"are {self.sqr}, {self.var}", "finite numbers >= 0, one of them above 0")

    @classmethod
    def from_noise_scale(cls, noise_scale: float, initial_batch_size: int) -> GradientStatistics:
        """Return statistics with ``M0 var / sqr = noise_scale`` (samples), sqr = 1."""
        return cls(sqr=1.0, var=noise_scale / initial_batch_size)


class LrRule:
    """One rule. Subclasses define ``name`` and :meth:`factor`; the other methods return what most rules say.

    ``scale`` is the total batch over the initial batch M0, which the learning rate was tuned for; every method raises
    InputError unless it is finite and above 0. ``statistics``: those of the gradient at M0, for rules that need them.
    """

    name: str = ""
    needs_statistics: bool = False

    def factor(self, scale: float, statistics: GradientStatistics | None = None) -> float:
        """Return the learning rate at batch ``scale * M0`` over that at M0; subclasses must define it."""
        raise NotImplementedError

    def warmup_epochs(self, scale: float, epochs_at_initial: float) -> float:
        """Return the epochs of warm-up at batch ``scale * M0``: as many as at M0, ``epochs_at_initial``."""
        checked_scale(scale)
        return epochs_at_initial

    def steps_at_initial(self, scale: float, statistics: GradientStatistics | None = None) -> float:
        """Return how many steps at M0 one step at batch ``scale * M0`` counts for in a schedule of steps.

        It is ``scale``, because the step has the samples of so many. A rule that knows a step's progress returns that instead.
        """
        return checked_scale(scale)

    def warmed_factor(
        self, scale: float, epoch: float, epochs_at_initial: float, statistics: GradientStatistics | None = None
    ) -> float:
        """Return the learning rate at ``epoch`` over that at M0: it rises linearly from 0 to :meth:`factor` in the warm-up.

        ``epochs_at_initial``: epochs of warm-up at M0, from which :meth:`warmup_epochs` tells those at ``scale``.
        """
        full_factor = self.factor(scale, statistics)
        warmup_epochs = self.warmup_epochs(scale, epochs_at_initial)
        if epoch >= warmup_epochs:
            return full_factor
        return full_factor * max(epoch, 0.0) / warmup_epochs


def checked_scale(scale: float) -> float:
    """Return ``scale``. Raises InputError unless it is finite and above 0."""
    if not (math.isfinite(scale) and scale > 0):
        raise InputError("scale", f"is {scale}", "the total batch over the initial batch is a number above 0")
    return float(scale)


class _Constant(LrRule):
    """The learning rate stays as it is."""

    name = "constant"

    def factor(self, scale: float, statistics: GradientStatistics | None = None) -> float:
        """Return 1 for every ``scale``."""
        checked_scale(scale)
        return 1.0


class _Linear(LrRule):
    """Linear scaling, S (Goyal et al. 2017, section 2.1): S small steps move as far as one large one."""

    name = "linear"

    def factor(self, scale: float, statistics: GradientStatistics | None = None) -> float:
        """Return ``scale`` itself."""
        return checked_scale(scale)


class _SquareRoot(LrRule):
    """Square root scaling (Krizhevsky 2014, section 5): keeps the variance of the update; usual with Adam."""

    name = "sqrt"

    def factor(self, scale: float, statistics: GradientStatistics | None = None) -> float:
        """Return the square root of ``scale``."""
        return math.sqrt(checked_scale(scale))


class _AdaScale(LrRule):
    """AdaScale (Johnson et al. 2020, section 3): the gain r, between 1 and S, from the gradient's noise at M0.

    ``r = (var + sqr) / (var / S + sqr)``: S where the gradient is noise alone, 1 where it has none. A step of batch M makes the
    progress of r steps of batch M0, and counts as r steps in its schedule. r / S is Pollux's statistical efficiency.
    """

    name = "adascale"
    needs_statistics = True

    def factor(self, scale: float, statistics: GradientStatistics | None = None) -> float:
        """Return the gain r at batch ``scale * M0``. Raises InputError without ``statistics``."""
        if statistics is None:
            raise InputError("adascale", "needs gradient statistics", "measure them, or choose linear or sqrt")
        var, sqr = statistics.var, statistics.sqr
        return (var + sqr) / (var / checked_scale(scale) + sqr)

    def steps_at_initial(self, scale: float, statistics: GradientStatistics | None = None) -> float:
        """Return the gain r: the paper calls steps counted so scale-invariant iterations."""
        return self.factor(scale, statistics)


class _Legw(_SquareRoot):
    """LEGW (You et al. 2019): square root scaling, and S times the epochs of warm-up."""

    name = "legw"

    def warmup_epochs(self, scale: float, epochs_at_initial: float) -> float:
        """Return ``scale`` times the epochs of warm-up that training at M0 has."""
        return checked_scale(scale) * epochs_at_initial


_RULES: dict[str, LrRule] = {}


def register(new: LrRule) -> None:
    """Make a rule known by its name to :func:`rule`. Raises InputError when it has no name or the name is taken."""
    if not new.name:
        raise InputError(type(new).__name__, "has no name", "set the class attribute name")
    if new.name in _RULES:
        raise InputError("rule", f'"{new.name}" exists', "choose another name")
    _RULES[new.name] = new


def rule(name: str) -> LrRule:
    """Return the rule of this name. Raises InputError, which lists the known names, for any other."""
    if name not in _RULES:
        raise InputError("rule", f'"{name}" is not known', did_you_mean(name, _RULES))
    return _RULES[name]


def rule_names() -> tuple[str, ...]:
    """Return the names of all known rules, in the order in which they were registered."""
    return tuple(_RULES)


for _rule in (_Constant(), _Linear(), _SquareRoot(), _AdaScale(), _Legw()):
    register(_rule)
