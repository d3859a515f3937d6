"""How a step's parameters, gradients and optimizer states are spread over its replicas: data parallelism, ZeRO and FSDP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ddltool.errors import InputError, did_you_mean

Kind = Literal["none", "ddp", "zero1", "zero2", "fsdp", "hsdp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How a step's parameters, gradients and optimizer state are spread over its replicas."""

    kind: Kind = "ddp"
    """What is sharded: nothing ("none", "ddp"), the optimizer states ("zero1"), or parameters, gradients and states ("zero2",
    whose parameters stay gathered between the two passes, "fsdp", and "hsdp", FSDP within groups of replicas)."""
    shard: int = 1
    """Processes that share one copy of what is sharded."""
    forward_shard: int = 0
    """Processes that share a block's parameters between its forward and backward pass; 0: as many as ``shard``."""
    sums: bool = False
    """Whether a step has several passes, whose gradients are summed: they are held from the first one's end on."""
    on_host: int = 0
    """Processes of a node that keep their parts in its host's memory; 0: parts are on the devices."""

    @classmethod
    def named(cls, text: str, replicas: int) -> Sharding:
        """Return the sharding that ``text`` names, on so many ``replicas``.

        The texts are ``none``, ``ddp``, ``zero1``, ``zero2``, ``fsdp``, ``fsdp:SHARD`` and ``hsdp:SHARD``. ``zero2`` is
        ``fully_shard`` with ``reshard_after_forward=False``, ``fsdp:SHARD`` with that number; ``hsdp:SHARD`` shards within
        groups of SHARD replicas. With ``:cpu`` behind zero2, fsdp or hsdp, all replicas keep their parts on one host. Raises
        InputError for other texts, and for a SHARD that does not divide the replicas.
        """
        if text.endswith(":cpu"):
            sharding = cls.named(text.removesuffix(":cpu"), replicas)
            if not sharding.gathers:
                raise InputError(
                    "--sharding", f"{text!r} shards no parameters", "give fsdp:cpu, zero2:cpu or hsdp:N:cpu"
                )
            return replace(sharding, on_host=replicas)
        kind_text, _, shard_text = text.partition(":")
        kind = next((known for known in get_args(Kind) if known == kind_text), None)
        if "offload" in text:
            raise InputError("--sharding", f"unknown {text!r}", "give fsdp:cpu for what CPUOffloadPolicy does")
        if kind == "hsdp" and not shard_text:
            raise InputError("--sharding", f"{text!r} does not say over how many", "give hsdp:SHARD, such as hsdp:8")
        if kind is None or (kind not in ("fsdp", "hsdp") and ":" in text):
            known_texts = ["none", "ddp", "zero1", "zero2", "fsdp", "fsdp:SHARD", "hsdp:SHARD"]
            raise InputError("--sharding", f"unknown {text!r}", did_you_mean(text, known_texts))
        if ":" not in text:  # what is sharded is spread over all replicas
            is_whole = kind in ("none", "ddp")
            return cls(kind=kind, shard=1 if is_whole else replicas)
        if not shard_text.isdecimal() or int(shard_text) < 1 or replicas % int(shard_text):
            problem = f"{text!r} shares among a SHARD that does not divide the replicas"
            raise InputError("--sharding", problem, "give one of 1 or more that does, such as hsdp:8")
        if kind == "fsdp":
            return cls(kind=kind, shard=replicas, forward_shard=int(shard_text))
        return cls(kind=kind, shard=int(shard_text))

    @property
    def gathers(self) -> bool:
        """Whether parameters are held in shards, and gathered block by block."""
        return self.kind in ("zero2", "fsdp", "hsdp")

    @property
    def reshards(self) -> bool:
        """Whether a block's parameters are given up after its forward pass, and gathered again."""
        return self.kind in ("fsdp", "hsdp")
