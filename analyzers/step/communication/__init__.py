"""Links, collectives, NCCL's times, DDP's buckets and FSDP2's units of one step."""
