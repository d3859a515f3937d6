"""Start one process per rank and let the others go on when one ends: THIS_FILE PROCESSES SCRIPT [ARGUMENT...].

torchrun ends all processes of a machine as soon as one fails. Here a killed worker is a matter between it and the
server: one line is printed for each process that ends. SIGTERM and Ctrl-C are passed on to all of them. The exit code
is that of the last rank, which is a server.

Before the transfers are connected nobody could go on: the others would wait for half an hour for one that ended while
it started. Then they are ended, too.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

GROUPS = 4  # that all ranks have joined when the transfers are connected: torch.distributed's own and those of a Wire
GRACE_S = 5.0


def awaited(store: Any, size: int, gone: set[int]) -> int | None:
    """Return a rank of those that are ``gone`` for which another waits in the store; None once the job has begun."""
    if not gone or not hasattr(store, "list_keys"):  # older versions of torch
        return None
    joined: dict[str, set[int]] = {}
    for key in store.list_keys():  # a rank that joins a group leaves its address under GROUP//.../RANK
        group, _, rank = key.rpartition("/")
        if "//" in group and rank.isdigit():
            joined.setdefault(group, set()).add(int(rank))
    if sum(len(ranks) == size for ranks in joined.values()) >= GROUPS:
        return None
    return next((rank for ranks in joined.values() for rank in gone if ranks - gone and rank not in ranks), None)


def main() -> None:
    """Start the processes, report each end, and wait for the last one."""
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        sys.exit(f"usage: python {sys.argv[0]} PROCESSES SCRIPT [ARGUMENT...]")
    import torch.distributed as dist  # seconds, which a wrong command line need not cost

    size, command = int(sys.argv[1]), sys.argv[2:]
    # The ranks meet in a store of this process, which takes a free port and outlives them all.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ) | meeting | {"WORLD_SIZE": str(size)}
    crew = {
        rank: subprocess.Popen([sys.executable, *command], env=environment | {"RANK": str(rank)})
        for rank in range(size)
    }
    print("started", *(f"rank {rank}: pid {process.pid}" for rank, process in crew.items()), sep="\n  ", flush=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in crew.values():
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    running, begin, kill_at = dict(crew), time.monotonic(), 0.0
    while running:
        time.sleep(0.05)
        if not kill_at and (lost := awaited(store, size, crew.keys() - running.keys())) is not None:
            print(
                f"rank {lost} ended before the job began, which cannot begin without it: ending the others", flush=True
            )
            pass_on(signal.SIGTERM, None)
            kill_at = time.monotonic() + GRACE_S
        if kill_at and time.monotonic() > kill_at:
            for process in running.values():
                process.kill()
        for rank, process in list(running.items()):
            if process.poll() is not None:
                del running[rank]
                code = process.returncode
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                print(f"rank {rank} {how} after {time.monotonic() - begin:.1f} s", flush=True)
    sys.exit(abs(crew[size - 1].returncode))


if __name__ == "__main__":
    main()
