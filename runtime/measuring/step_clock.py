"""Runs a training script unchanged and times its optimizer steps from outside, by ``python -m``.

Arguments: a file for the times, how many steps to make, the script, and its arguments. Every rank stamps wall clock and its
own CPU seconds (all threads; data workers are other processes) after each ``optimizer.step()``, by torch's global hook, so
the clock is the same whether ddltool is on or off. After the last step wanted the process ends.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

PATIENCE_S = 1.0
"""How long a rank that is done stays, for others to receive what it has sent."""


def main() -> None:
    """Run the script of the command line under the clock."""
    file, steps, script = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(script).resolve().parent)  # as the interpreter does for a script

    from torch.optim.optimizer import register_optimizer_step_post_hook

    stamps: list[tuple[float, float]] = []
    rank = os.environ.get("RANK", "0")

    def note(*_: object) -> None:
        stamps.append((time.perf_counter(), time.process_time()))
        if len(stamps) == steps:
            write()
            time.sleep(PATIENCE_S)
            os._exit(0)  # in the middle of the script: its own ending has nothing to say

    def write() -> None:
        target = file.with_name(f"{file.name}.{rank}")
        target.with_suffix(".new").write_text(json.dumps(stamps), encoding="utf-8")
        target.with_suffix(".new").replace(target)

    register_optimizer_step_post_hook(note)
    runpy.run_path(script, run_name="__main__")
    write()


if __name__ == "__main__":
    main()
