"""Start one process per rank and let the others go on when one ends: THIS_FILE PROCESSES SCRIPT [ARGUMENT...].

torchrun ends all processes of a machine as soon as one fails. Here a killed worker is a matter between it and the
server: one line is printed for each process that ends. SIGTERM and Ctrl-C are passed on to all of them. The exit code
is that of the last rank, which is a server.

Before all have met nobody could go on: the others would wait for minutes for one that ended while it started. Then
they are ended, too.

The ranks meet at a free port of this machine, or at the HOST:PORT in DDLTOOL_SERVER, with the secret in DDLTOOL_TOKEN.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

GRACE_S = 5.0


def main() -> None:
    """Choose where the processes meet, and run them."""
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        sys.exit(f"usage: python {sys.argv[0]} PROCESSES SCRIPT [ARGUMENT...]")
    size, command = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        # Bound here and never listened at, the port is nobody else's until server 0 listens.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        meeting = {"DDLTOOL_SERVER": f"127.0.0.1:{port.getsockname()[1]}", "DDLTOOL_TOKEN": secrets.token_hex(16)}
        if "DDLTOOL_SERVER" in os.environ:
            meeting = {}
        begun = Path(folder, "begun")  # server 0 makes it when all have met
        meeting |= {"DDLTOOL_BEGUN": str(begun), "WORLD_SIZE": str(size)}
        sys.exit(run(size, command, {"OMP_NUM_THREADS": "1"} | dict(os.environ) | meeting, begun))


def run(size: int, command: list[str], environment: dict[str, str], begun: Path) -> int:
    """Run ``size`` processes of ``command``, report each end, and return the exit code of the last rank.

    ``begun``: the file that server 0 makes when all have met. SIGTERM and Ctrl-C are handled from here on.
    """
    crew = {
        rank: subprocess.Popen([sys.executable, *command], env=environment | {"RANK": str(rank)})
        for rank in range(size)
    }
    print("started", *(f"rank {rank}: pid {process.pid}" for rank, process in crew.items()), sep="\n  ", flush=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        """Send the signal ``number`` to all processes."""
        for process in crew.values():
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    running, begin, kill_at = (
        dict(crew),
        time.monotonic(),
        0.0,
    )  # kill_at: when those that are left are killed; 0: never
    while running:
        time.sleep(0.05)
        if len(running) < size and not kill_at and not begun.exists():
            lost = min(crew.keys() - running.keys())
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
    return abs(crew[size - 1].returncode)


if __name__ == "__main__":
    main()
