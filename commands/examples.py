"""One example for each command, shown below its ``--help``. Plain text: typer reads it as one paragraph.

Commands whose own help text has an example are left out.
"""

from __future__ import annotations

EXAMPLES: dict[str, str] = {
    "trace": "ddltool trace zoo:resnet50_v1 --device K80 --bandwidth 10Gbit -o graph.json",
    "predict": "ddltool predict timm:resnet50 --device A100,L4,RTX4090 --precision amp",
    "calibrate": "ddltool calibrate profile.csv --model train.py:make_model --device MYGPU -o device.yaml",
    "profile": "ddltool profile train.py:make_model --batch-sizes 8,16,32 --replicas 1,2 -o profile.csv",
    "fit": "ddltool fit profile.csv --holdout scalability.csv -o goodput.json",
    "plan": "ddltool plan job.yaml --strategy est -o plan.json",
    "emit": "ddltool emit plan.json --target torchrun -o launch.sh",
    "verify": "ddltool verify plan.json telemetry.jsonl --max-error 15%",
    "diff-run": "ddltool diff-run run-a.jsonl run-b.jsonl",
    "balance": "ddltool balance trace.csv --predictor ema --total-batch 512",
    "barrier": "ddltool barrier times.csv --lookahead 30 --algorithm all",
    "simulate": "ddltool simulate workload.csv --cluster cluster.yaml --traces traces --policy fifo,ours",
    "companion": "ddltool companion job.yaml -o plans.db; then: ddltool companion plans.db --lookup V100=2,T4=1",
    "demo": "ddltool demo -o my-demo",
    "devices": "ddltool devices A100 --json",
    "zoo": "ddltool zoo --json",
    "schema": "ddltool schema plan -o plan.schema.json",
    "doctor": 'ddltool doctor; or: ddltool doctor --overhead "train.py --epochs 1" --max-overhead 1%',
}


def epilog(command: str) -> str | None:
    """Return the line below the help of a command; None for one without an example.

    >>> epilog("zoo")
    'Example: ddltool zoo --json'
    """
    example = EXAMPLES.get(command)
    return f"Example: {example}" if example else None
