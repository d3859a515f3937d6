"""Models that `measure_gpu.py` measures beside those of timm and transformers, as factories that ddltool reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Example = tuple[nn.Module, Tensor]


def perceptron() -> Example:
    """Eight layers of 2048: nothing but matrix products."""
    layers = (part for _ in range(8) for part in (nn.Linear(2048, 2048), nn.ReLU()))
    return nn.Sequential(*layers), torch.zeros(1, 2048)


class _Recurrent(nn.Module):
    """Two LSTM layers of 512 with a vocabulary of 10,000."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classes = nn.Embedding(10_000, 512), nn.Linear(512, 10_000)
        self.layers = nn.LSTM(512, 512, 2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        made: Tensor = self.classes(self.layers(self.embedding(words))[0])
        return made


def recurrent() -> Example:
    """A language model of two LSTM layers over 35 words."""
    return _Recurrent(), torch.zeros(1, 35, dtype=torch.long)


def encoder() -> Example:
    """Six of torch's own transformer layers of 512, over 128 places."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.zeros(1, 128, 512)


class _UNet(nn.Module):
    """Four levels of two convolutions with group norms, skips between them, as diffusion models have."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 4 * width]
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([width, *widths], widths, strict=False))
        above = zip(reversed([*widths[1:], widths[-1]]), reversed(widths), strict=True)
        self.up = nn.ModuleList(_pair(a + b, b) for a, b in above)
        self.last = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, 4, height, width)."""
        made, kept = self.first(images), []
        for part in self.down:
            made = part(made)
            kept.append(made)
            made = F.avg_pool2d(made, 2)
        for part in self.up:
            made = part(torch.cat([F.interpolate(made, scale_factor=2.0, mode="nearest"), kept.pop()], 1))
        made = self.last(made)
        return made


def _pair(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.GroupNorm(32, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1)),
        *(nn.GroupNorm(32, outer), nn.SiLU(), nn.Conv2d(outer, outer, 3, padding=1)),
    )


def unet() -> Example:
    """A U-Net over latents of 4 x 64 x 64."""
    return _UNet(), torch.zeros(1, 4, 64, 64)
