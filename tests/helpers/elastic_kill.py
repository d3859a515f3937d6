"""A training job that kills itself: ``torchrun -m tests.helpers.elastic_kill CHECKPOINT STEPS KILLS``.

In each of the first KILLS attempts, one rank sends itself SIGKILL: a random time after training began, or (in two of
four attempts) after its first checkpoint, so that the job gets on.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn

from ddltool.runtime.elastic import ElasticTrainer, start_processes
from tests.helpers.elastic_workers import Digits, build


def main(path: str, until: int, kills: int) -> None:
    """Train up to step ``until`` with a checkpoint after every step."""
    start_processes()
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    module, update, scheduler = build("cnn", "sgd")
    extras = {"scheduler": scheduler}
    trainer = ElasticTrainer(module, update, nn.CrossEntropyLoss(), Digits(), bucket_mib=0.01, extras=extras)
    trainer.resume(path)
    if dist.get_rank() == 0:
        print(f"attempt {attempt} begins after step {trainer.steps_made}", flush=True)
    bomb = None
    if attempt < kills and attempt % dist.get_world_size() == dist.get_rank():
        delay_s = random.Random(f"delay {attempt}").uniform(0.0, 0.25)
        bomb = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
    if bomb is not None and attempt % 4 < 2:
        bomb.start()
    for epoch in range(until):
        for step in trainer.epoch(epoch):
            scheduler.step()
            trainer.save(path)
            if bomb is not None and not bomb.is_alive():
                bomb.start()
            if step.number == until:
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
