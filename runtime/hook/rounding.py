"""The average of a tensor over processes, of its own type or rounded to few bits. Start at :func:`averaged`.

Rounded to 16 bits numbers are bfloat16; to 8 and 4 bits whole numbers of -127 to 127 and -7 to 7 by a scale for each
:data:`BLOCK`. Each process receives every other's rounded numbers of its own part, sums them in the tensor's type, and sends
the average on, rounded once more: all have the same bits, and every number travels 2 (n - 1) / n times, as in a ring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""So many numbers share a scale."""
_STEPS = {8: 127, 4: 7}


def averaged(value: Tensor, group: Any, bits: int = 32, weight: float = 1.0) -> Tensor:
    """Return the average of the (n,) tensors of a process group's ranks, weighed by each one's ``weight``.

    ``group``: a ``torch.distributed.ProcessGroup``, registered or not. Blocks until it is there.
    """
    ranks = group.size()
    if bits == 32:
        flat = torch.cat((value * weight, value.new_tensor([weight])))
        group.allreduce([flat]).wait()
        return flat[:-1] / flat[-1]
    weights = torch.tensor([weight], dtype=torch.float64)
    group.allreduce([weights]).wait()
    length = -(-value.numel() // (ranks * BLOCK)) * BLOCK
    parts = torch.nn.functional.pad(value * weight, (0, ranks * length - value.numel())).view(ranks, length)
    packed = torch.stack([packed_bits(part, bits) for part in parts])
    received = torch.empty_like(packed)
    group.alltoall_base(received.view(-1), packed.view(-1), [], []).wait()
    own = torch.stack([unpacked(row, bits, value.dtype) for row in received]).sum(dim=0) / float(weights)
    mine = packed_bits(own, bits)
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    group.allgather([gathered], [mine]).wait()
    return torch.cat([unpacked(row, bits, value.dtype) for row in gathered])[: value.numel()]


def packed_bits(value: Tensor, bits: int) -> Tensor:
    """Return (n,) numbers as bytes: their rounded values, then for 8 and 4 bits a float32 scale for each block."""
    if bits == 16:
        return value.to(torch.bfloat16).view(torch.uint8)
    steps, blocks = _STEPS[bits], value.view(-1, BLOCK)
    scales = (blocks.abs().amax(dim=1, keepdim=True) / steps).to(torch.float32)
    levels = (blocks / scales.clamp_min(1e-38)).round().clamp(-steps, steps).to(torch.int8).view(-1)
    if bits == 4:
        pairs = (levels + steps).to(torch.uint8).view(-1, 2)
        levels = pairs[:, 0] | (pairs[:, 1] << 4)
    return torch.cat((levels.view(torch.uint8), scales.view(-1).view(torch.uint8)))


def unpacked(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the (n,) numbers of :func:`packed_bits`, as a type."""
    if bits == 16:
        return packed.view(torch.bfloat16).to(dtype)
    # n bytes (or half of them) and 4 for each block
    blocks = packed.numel() // (BLOCK * bits // 8 + 4)
    levels, scales = packed[: blocks * BLOCK * bits // 8], packed[blocks * BLOCK * bits // 8 :].clone()
    if bits == 4:
        levels = torch.stack((levels & 15, levels >> 4), dim=1).view(-1)
        numbers = levels.to(dtype) - _STEPS[4]
    else:
        numbers = levels.view(torch.int8).to(dtype)
    return (numbers.view(-1, BLOCK) * scales.view(torch.float32).to(dtype)[:, None]).view(-1)
