"""torch's flexible attention, whose kernel is compiled on a GPU: recorded as fused attention, causal where a mask is given.

Which blocks a mask leaves out only a run knows; half of them is what a causal mask of one document leaves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def stand_in_flexible_attention(module: Any) -> None:
    """Replace two functions of ``module``, ``torch.nn.attention.flex_attention``, so that it attends in one fused op.

    Block masks are made without values.
    """

    def flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None,
                       scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
                       kernel_options: Any = None, *, return_aux: Any = None) -> Any:  # fmt: skip
        """Return attention of (batch, heads, tokens, width) from one fused op, causal where a block mask is given.

        The arguments are those of torch's function; ``score_mod`` and ``kernel_options`` are ignored. With ``return_lse`` or
        ``return_aux`` a pair is returned, whose second part has the shapes of torch's: the logarithms of the softmax's sums,
        (batch, heads, tokens) in float32, alone or in an object with the largest scores.
        """
        is_causal = block_mask is not None and query.shape[-2] > 1
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if return_lse or return_aux is not None:
            log_sums = out[..., 0].float()  # right in shape and type; nothing here has values
            return out, log_sums if return_lse else module.AuxOutput(lse=log_sums, max_scores=log_sums)
        return out

    def create_block_mask(mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None,
                          BLOCK_SIZE: Any = 128, *_: Any, **__: Any) -> Any:  # fmt: skip
        """Return a mask of (batch, heads, queries' blocks, keys' blocks) without values.

        ``mask_mod`` is kept and never called. ``B`` or ``H`` None: one mask for all samples or heads. ``BLOCK_SIZE``:
        tokens in a block, or (queries, keys).
        """
        rows, columns = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
        shape = (B or 1, H or 1, -(-Q_LEN // rows), -(-KV_LEN // columns))  # numbers of blocks, rounded up
        count = torch.empty(shape[:3], dtype=torch.int32, device=device or "cuda")
        indices = torch.empty(shape, dtype=torch.int32, device=device or "cuda")
        # Number and indices of the blocks that a mask cuts through, and again of those that it leaves whole.
        return module.BlockMask.from_kv_blocks(
            count, indices, count, indices, (rows, columns), mask_mod, (Q_LEN, KV_LEN), compute_q_blocks=False
        )

    module.flex_attention, module.create_block_mask = flex_attention, create_block_mask
