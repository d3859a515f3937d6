"""Generated training graphs for growth measurements: shaped like a deep network, synthetic in every number."""

from __future__ import annotations

import random

from ddltool.graph import Graph, Op


def deep_network(recvs: int, ops: int, *, branches: int = 1, mode: str = "training", seed: int = 0) -> Graph:
    """Return a network of ``recvs`` layers in blocks of ``branches`` parallel layers, about ``ops`` ops in all.

    Each layer waits for its parameter and for the block before it; its compute is split into a chain of equal length.
    In training a backward chain follows with one send per parameter. Communication and computation are of one size.
    """
    chance = random.Random(seed)
    training = mode == "training"
    passes = 3 if training else 1
    length = max(1, (ops - recvs * (2 if training else 1)) // (recvs * passes))
    rows: list[Op] = []
    sizes = [chance.uniform(0.2, 1.8) for _ in range(recvs)]

    def chain(prefix: str, inputs: tuple[str, ...]) -> str:
        for step in range(length):
            rows.append(
                Op(name=f"{prefix}.{step}", kind="compute", duration_s=chance.uniform(0.2, 1.8) / length, inputs=inputs)
            )
            inputs = (rows[-1].name,)
        return rows[-1].name

    joined: tuple[str, ...] = ()
    forward: list[str] = []
    for first in range(0, recvs, branches):
        block = range(first, min(recvs, first + branches))
        for layer in block:
            name, size = f"recv{layer}", sizes[layer]
            rows += [Op(name=name, kind="recv", resource="channel:0", duration_s=size, parameter=f"w{layer}")]
        ends = tuple(chain(f"forward{layer}", (f"recv{layer}", *joined)) for layer in block)
        forward.extend(ends)
        joined = ends
    if training:
        for layer in reversed(range(recvs)):
            back = chain(f"backward{layer}", tuple(dict.fromkeys((forward[layer], *joined))))
            gradient = chain(f"gradient{layer}", (back,))
            rows.append(
                Op(
                    name=f"send{layer}",
                    kind="send",
                    resource="channel:0",
                    duration_s=sizes[layer],
                    parameter=f"w{layer}",
                    inputs=(gradient,),
                )
            )
            joined = (back,)
    return Graph.from_ops(f"deep{recvs}x{ops}", "training" if training else "inference", rows)
