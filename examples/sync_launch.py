"""Start one process per rank and let the others go on when one ends: THIS_FILE PROCESSES SCRIPT [ARGUMENT...].

torchrun ends all processes of a machine as soon as one fails. Here a killed worker is a matter between it and the
server: one line is printed for each process that ends. SIGTERM and Ctrl-C are passed on to all of them. The exit code
is that of the last rank, which is a server.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType


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
    running, begin = dict(crew), time.monotonic()
    while running:
        time.sleep(0.05)
        for rank, process in list(running.items()):
            if process.poll() is not None:
                del running[rank]
                code = process.returncode
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                print(f"rank {rank} {how} after {time.monotonic() - begin:.1f} s", flush=True)
    sys.exit(abs(crew[size - 1].returncode))


if __name__ == "__main__":
    main()
