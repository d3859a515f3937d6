"""Averages a tensor over processes, in its own type or rounded to few bits. Start at :func:`averaged`.

With 16 bits numbers are sent as bfloat16. With 8 or 4 bits they are sent as integers from -127 to 127, or from -7 to 7,
with one scale for each :data:`BLOCK` numbers. Each of n processes averages one part of the tensor: it receives every
process's rounded numbers of that part, adds them in the tensor's type, and sends the average to all, rounded once more.
So all processes get the same bits, and each number is sent 2 (n - 1) / n times, as in a ring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 256
"""Number of numbers that share a scale."""
_STEPS = {8: 127, 4: 7}  # by bits: the largest integer


def averaged(value: Tensor, group: Any, bits: int = 32, weight: float = 1.0) -> Tensor:
    """Return the weighted average, (n,), of the ranks' tensors ``value``; blocks until all ranks of the group call it.

    Args:
        value: this rank's numbers, (n,).
        group: a ``torch.distributed.ProcessGroup``, registered with torch.distributed or not.
        bits: of a number when it is sent: 32 (its own type), 16, 8 or 4.
        weight: this rank's weight in the average.
    """
    ranks = group.size()
    if bits == 32:
        flat = torch.cat((value * weight, value.new_tensor([weight])))  # one message for the sum and the total weight
        group.allreduce([flat]).wait()
        return flat[:-1] / flat[-1]
    weights = torch.tensor([weight], dtype=torch.float64)
    group.allreduce([weights]).wait()
    part_length = -(-value.numel() // (ranks * BLOCK)) * BLOCK  # each rank averages a part, rounded up to whole blocks
    padding = ranks * part_length - value.numel()
    parts = torch.nn.functional.pad(value * weight, (0, padding)).view(ranks, part_length)
    packed = torch.stack([packed_bits(part, bits) for part in parts])  # (ranks, bytes): a row for each rank's part
    received = torch.empty_like(packed)  # (ranks, bytes): this rank's part, as each rank has it
    group.alltoall_base(received.view(-1), packed.view(-1), [], []).wait()  # []: all parts are equally long
    part_average = torch.stack([unpacked(row, bits, value.dtype) for row in received]).sum(dim=0) / float(weights)
    packed_average = packed_bits(part_average, bits)
    gathered = [torch.empty_like(packed_average) for _ in range(ranks)]
    group.allgather([gathered], [packed_average]).wait()
    return torch.cat([unpacked(row, bits, value.dtype) for row in gathered])[: value.numel()]


def packed_bits(value: Tensor, bits: int) -> Tensor:
    """Return ``value``, (n,), rounded to ``bits`` bits, as a tensor of bytes (uint8).

    For 16 bits these are the 2 n bytes of bfloat16. For 8 and 4 bits, n or n / 2 bytes of integers are followed by a
    float32 scale for each block; n must be a multiple of :data:`BLOCK`.
    """
    if bits == 16:
        return value.to(torch.bfloat16).view(torch.uint8)
    largest = _STEPS[bits]
    blocks = value.view(-1, BLOCK)
    scales = (blocks.abs().amax(dim=1, keepdim=True) / largest).to(torch.float32)
    # 1e-38: no division by zero in a block of zeros.
    levels = (blocks / scales.clamp_min(1e-38)).round().clamp(-largest, largest).to(torch.int8).view(-1)
    if bits == 4:
        # Two neighbours, shifted to 0 to 14, share a byte: the first has its lower half.
        pairs = (levels + largest).to(torch.uint8).view(-1, 2)
        levels = pairs[:, 0] | (pairs[:, 1] << 4)
    return torch.cat((levels.view(torch.uint8), scales.view(-1).view(torch.uint8)))


def unpacked(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers, (n,) of type ``dtype``, from the bytes that :func:`packed_bits` has made with ``bits``."""
    if bits == 16:
        return packed.view(torch.bfloat16).to(dtype)
    integer_bytes = BLOCK * bits // 8  # of a block
    scale_bytes = 4  # of a block: a float32
    block_count = packed.numel() // (integer_bytes + scale_bytes)
    levels = packed[: block_count * integer_bytes]
    # A copy of the scales: where they begin need not be aligned for a view as float32.
    scales = packed[block_count * integer_bytes :].clone()
    if bits == 4:
        levels = torch.stack((levels & 15, levels >> 4), dim=1).view(-1)
        numbers = levels.to(dtype) - _STEPS[4]
    else:
        numbers = levels.view(torch.int8).to(dtype)
    return (numbers.view(-1, BLOCK) * scales.view(torch.float32).to(dtype)[:, None]).view(-1)
