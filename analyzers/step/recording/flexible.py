"""torch's flexible attention, whose kernel is compiled on a GPU: recorded as fused attention, causal where a mask is given.

Which blocks a mask leaves out only a run knows; half of them is what a causal mask of one document leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def stand_in_flexible_attention(module: Any) -> None:
    """Let ``torch.nn.attention.flex_attention`` make masks without values, and attend in one op."""

    def flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None,
                       scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
                       kernel_options: Any = None, *, return_aux: Any = None) -> Any:  # fmt: skip
        is_causal = block_mask is not None and query.shape[-2] > 1
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if return_lse or return_aux is not None:
            lse = out[..., 0].float()
            return out, lse if return_lse else module.AuxOutput(lse=lse, max_scores=lse)
        return out

    def create_block_mask(mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None,
                          BLOCK_SIZE: Any = 128, *_: Any, **__: Any) -> Any:  # fmt: skip
        rows, columns = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
        shape = (B or 1, H or 1, -(-Q_LEN // rows), -(-KV_LEN // columns))
        count = torch.empty(shape[:3], dtype=torch.int32, device=device or "cuda")
        places = torch.empty(shape, dtype=torch.int32, device=device or "cuda")
        return module.BlockMask.from_kv_blocks(
            count, places, count, places, (rows, columns), mask_mod, (Q_LEN, KV_LEN), compute_q_blocks=False
        )

    module.flex_attention, module.create_block_mask = flex_attention, create_block_mask
