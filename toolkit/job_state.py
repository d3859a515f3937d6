"""The present state of a running job: its GPUs, the free ones, the work that is left (kind ``ddltool.job_state``)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from ddltool.artifacts import Artifact
from ddltool.quantities import AtLeastOne, Duration, NonNegative, Positive, Seconds

Held = Annotated[int, Strict(), Field(ge=0, le=100_000)]


class JobState(Artifact):
    """The state of a job from which advice on resizing it is made. Times in seconds, batch sizes in samples."""

    kind: Literal["ddltool.job_state"] = "ddltool.job_state"
    goodput: str = Field(description="the fitted throughput model (kind ddltool.goodput), relative to this file")
    device: str = Field(default="", description="its device type, where the model has several")
    noise_scale: NonNegative = Field(description="gradient noise scale now, samples")
    initial_batch_size: AtLeastOne = Field(description="M0, the total batch that the learning rate was tuned for")
    max_batch_size: AtLeastOne
    max_local_batch_size: AtLeastOne = Field(description="what fits into a device's memory")
    held: list[Held] = Field(min_length=1, max_length=1000, description="GPUs that the job has, per node")
    free: list[Held] = Field(min_length=1, max_length=1000, description="GPUs that nobody has, per node")
    max_replicas: AtLeastOne | None = Field(default=None, description="the most GPUs that it may be given")
    remaining_s: Duration | None = Field(default=None, description="time left on what it has; the median of a guess")
    remaining_samples: Positive | None = Field(
        default=None, description="samples left, at the efficiency of M0; instead of remaining_s"
    )
    remaining_factor: Annotated[float, Strict(), Field(ge=1, le=1000, allow_inf_nan=False)] = Field(
        default=1.0, description="two thirds of such guesses lie within the median over and times this; 1: known"
    )
    restarts_s: list[Seconds] = Field(
        min_length=1, max_length=100_000, description="measured restarts, from stop to the next step"
    )
    hold_s: Duration | None = Field(default=None, description="how long it would keep other GPUs; null: to its end")

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        """Refuse a state that contradicts itself.

        That is: ``held`` and ``free`` of unequal length, no held GPU, both or neither of ``remaining_s`` and
        ``remaining_samples``, an initial batch above the largest.
        """
        if len(self.held) != len(self.free):
            raise ValueError(f"free has {len(self.free)} nodes, held has {len(self.held)}; one number per node in both")
        if not sum(self.held):
            raise ValueError("held are no GPUs; a job that does not run has nothing to restart")
        if (self.remaining_s is None) == (self.remaining_samples is None):
            raise ValueError("remaining_s and remaining_samples are both or neither there; give one of them")
        if self.initial_batch_size > self.max_batch_size:
            problem = f"initial_batch_size is {self.initial_batch_size}, above max_batch_size, {self.max_batch_size}"
            raise ValueError(f"{problem}; it must be at most that")
        return self
