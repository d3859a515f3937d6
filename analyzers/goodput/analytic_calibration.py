"""What predictions without the device rest on, and how far off they were: figures of ``benchmarks/bench_analytic.py``.

Three applications (ResNet-50 at 224 in mixed precision, ResNet-18 at 32, BERT-base at 384 tokens) on three GPUs (NVIDIA
T4, RTX 2080 Ti, A100), measured by the authors of Pollux (OSDI 2021) and Sia (SOSP 2023). The figures are those that
predict step times best, not properties of the hardware: a product of more FLOPs than kernels need (Winograd) shows as a
share above 1, and the host's part holds what AdaptDL, under which everything was measured, does per gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddltool.analyzers.goodput.analytic import Calibration

CALIBRATION = Calibration(
    vector_share=1.33, matrix_unit_share=0.833, bandwidth_share=0.326, per_op_s=24.9e-6, per_parameter_s=488e-6
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Predicted over measured step times of one application on one device that the calibration had not seen."""

    application: str
    device: str
    mape: float
    """With the application left out."""
    low: float
    high: float
    unseen_device_mape: float
    """With the application and the device left out."""
    unseen_device_low: float
    unseen_device_high: float


def _row(application: str, device: str, *figures: float) -> HeldOut:
    mape, low, high, unseen, unseen_low, unseen_high = figures
    return HeldOut(
        application=application,
        device=device,
        mape=mape,
        low=low,
        high=high,
        unseen_device_mape=unseen,
        unseen_device_low=unseen_low,
        unseen_device_high=unseen_high,
    )


HELD_OUT = (
    _row("imagenet", "T4", 0.215, 0.74, 0.94, 0.354, 0.55, 0.86),
    _row("imagenet", "RTX2080Ti", 0.330, 0.50, 0.85, 0.378, 0.47, 0.79),
    _row("imagenet", "A100", 0.306, 0.57, 0.75, 0.177, 0.64, 1.23),
    _row("cifar10", "T4", 0.334, 1.16, 1.55, 0.203, 0.96, 1.52),
    _row("cifar10", "RTX2080Ti", 0.358, 1.05, 1.55, 0.533, 1.07, 1.90),
    _row("cifar10", "A100", 0.204, 1.01, 1.39, 0.545, 1.37, 1.68),
    _row("bert", "T4", 0.224, 0.76, 0.79, 0.231, 0.75, 0.78),
    _row("bert", "RTX2080Ti", 0.043, 0.91, 1.03, 0.055, 0.91, 1.05),
    _row("bert", "A100", 0.440, 1.13, 1.64, 0.717, 1.22, 2.09),
)
# Several replicas, the application left out: with a bandwidth that fits the other applications. With the datasheet's it is
# 0.15 to 1.67.
SEVERAL_REPLICAS = (0.51, 1.72)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRange:
    """Between which factors predictions lay: predicted / measured."""

    low: float
    high: float
    mape: float
    """Of one replica."""
    device_seen: bool
    """Whether the device is one of those that the calibration knows."""

    def interval_s(self, predicted_s: float) -> tuple[float, float]:
        """Return the measured times for which ``predicted_s`` would be as far off as anything was, low and high."""
        return predicted_s / self.high, predicted_s / self.low


def error_range(device: str, *, several_replicas: bool) -> ErrorRange:
    """Return the range over all held-out applications; wider for a device that the calibration does not know."""
    seen = device in {entry.device for entry in HELD_OUT}
    lows = [entry.low if seen else entry.unseen_device_low for entry in HELD_OUT]
    highs = [entry.high if seen else entry.unseen_device_high for entry in HELD_OUT]
    mapes = [entry.mape if seen else entry.unseen_device_mape for entry in HELD_OUT]
    if several_replicas:
        lows.append(SEVERAL_REPLICAS[0])
        highs.append(SEVERAL_REPLICAS[1])
    return ErrorRange(low=min(lows), high=max(highs), mape=sum(mapes) / len(mapes), device_seen=seen)


def error_text(device: str) -> str:
    """Return in words how far predictions for a device were off."""
    found = error_range(device, several_replicas=False)
    what = "applications" if found.device_seen else "applications and devices"
    return (
        f"on 3 applications x 3 GPUs, {what} left out of the calibration, predictions were between "
        f"{found.low:g} and {found.high:g} times the measured step (mean error {found.mape:.0%})"
    )
