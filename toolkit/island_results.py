"""Record of a plan for islands: groups of devices that train separately and exchange parameters every so many steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddltool.plans import Plan
from ddltool.quantities import AtLeastOne, Count, Duration, Name, NonNegative, Number, Positive, Rate, Seconds, Share
from ddltool.results import Part, Result

Way = Literal["equal", "steps", "samples"]


class PublishedLoss(Part):
    """The change of the evaluation loss against data parallel training that papers measured in similar settings."""

    low: Number = Field(description="relative change of the loss")
    high: Number
    islands: AtLeastOne
    every: AtLeastOne
    parameters_low: NonNegative
    parameters_high: NonNegative
    source: str


class IslandFigures(Part):
    """One island with its own best synchronous plan. Predicted."""

    devices: Name
    samples: AtLeastOne = Field(description="of an inner step, by the island's number of devices")
    step_s: Duration = Field(description="seconds of an inner step with these")
    samples_by_speed: AtLeastOne | None = Field(
        default=None, description="with which all islands' steps end together; null: islands are alike"
    )
    step_by_speed_s: Duration | None = None
    outer_bytes: NonNegative = Field(description="of outer parameters and momentum on each device, as the plan shards")
    memory_bytes: NonNegative | None = Field(default=None, description="of a process without those; null: not known")
    free_bytes: Number | None = Field(default=None, description="that a device has left with both; below 0: too few")
    plan: Plan = Field(description="for the samples that the picked row takes")


class SynchronousStep(Part):
    """A step in which all islands synchronise their gradients. Predicted."""

    name: Literal["one job", "DDP between islands"]
    text: str
    step_s: Duration


class OuterRow(Part):
    """The figures for one number of inner steps between outer steps. Predicted; step times are per total batch of samples."""

    outer_every: AtLeastOne = Field(description="inner steps of an island between outer steps, on average")
    inner_steps: list[AtLeastOne] = Field(description="of each island")
    way: Way = Field(description="steps, samples: what unequal islands take by their speeds; equal: nothing")
    step_s: Duration = Field(description="where islands wait for all that is sent")
    exposed_s: Seconds = Field(description="of these, waiting for the link")
    overlap: Count = Field(description="inner steps that go on while a fragment travels, in overlapped_s")
    overlapped_s: Duration
    overlapped_exposed_s: Seconds
    sent_bytes: NonNegative = Field(description="by each island, over the link, between two outer steps")
    sent_bytes_per_s: NonNegative = Field(description="on average, with overlap")
    ways: dict[Way, Seconds] = Field(description="overlapped_s by what unequal islands take by their speeds")
    published: PublishedLoss | None = Field(default=None, description="null: nobody published a setting like this one")


class OuterSetting(Part):
    """The settings of the hook's outer steps."""

    every: Annotated[list[AtLeastOne], Field(min_length=2, description="inner steps of each island")]
    fragments: AtLeastOne
    overlap: Count
    bits: Annotated[int, Field(ge=4, le=32, description="of an exchanged number: 4, 8, 16 or 32")]
    learning_rate: Positive = 0.7
    momentum: Share = 0.9
    mixing: Share = Field(default=0.0, description="alpha: the share of its own parameters that an island keeps")


class IslandsPlan(Result):
    """The result of ``ddltool plan --devices A+B --link-between RATE``: islands on a slow link, by number of inner steps."""

    kind: Literal["ddltool.islands_plan"] = "ddltool.islands_plan"
    source: str
    link_bytes_per_s: Rate
    link_latency_s: Seconds
    parameters: AtLeastOne = Field(description="numbers that are trained, and exchanged")
    total_batch: AtLeastOne
    compute_s: Duration = Field(description="of a step if nothing had to be sent between islands")
    islands: Annotated[list[IslandFigures], Field(min_length=2)]
    synchronous: list[SynchronousStep] = Field(description="the fastest first")
    rows: Annotated[list[OuterRow], Field(min_length=1, description="by outer_every")]
    picked: AtLeastOne = Field(description="outer_every of the row that is as fast as any with fewest inner steps")
    good_enough: bool = Field(description="whether a synchronous step is as fast")
    outer: OuterSetting = Field(description="of the picked row")

    @property
    def best(self) -> OuterRow:
        """The picked row of ``rows``."""
        return next(row for row in self.rows if row.outer_every == self.picked)
