"""Training whose batch size follows the goodput (Pollux). Start at :class:`GoodputAgent`."""

from ddltool.runtime.agent.agent import GoodputAgent

__all__ = ["GoodputAgent"]
