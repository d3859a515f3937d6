"""A command line that starts training, read as its launcher reads it: the script, its arguments, the world of processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddltool.errors import InputError

_FORMS = "python train.py, python -m package.train, torchrun train.py or accelerate launch train.py"
"""Examples of the commands that can be read, for messages."""
_PYTHON = re.compile(r"python(3(\.\d+)?)?(\.exe)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
"""A variable set before the command: ``CUDA_VISIBLE_DEVICES=0``."""
_MOST_PROCESSES = 100_000


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher starts on every process."""

    script: tuple[str, ...]
    """The script's file or the module's name, and the arguments after it."""
    is_module: bool = False
    """Whether ``script`` begins with a module's name (``python -m``), and not with a file."""
    processes: int | None = None
    """On all nodes; None: one process of plain python, which may start others by itself."""
    per_node: int = 1
    """Processes of a node."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables set before the command, and those of the launcher's options (accelerate)."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables that rank 0 finds: those set before the command, and the launcher's own."""
        if self.processes is None:
            return self.environment
        world = {
            "RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "ROLE_RANK": 0, "WORLD_SIZE": self.processes,
            "LOCAL_WORLD_SIZE": self.per_node, "ROLE_WORLD_SIZE": self.processes, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "recorded", "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }  # fmt: skip
        return self.environment | {name: str(value) for name, value in world.items()}


def launched(command: Sequence[str], gpus_per_node: int) -> Launched:
    """Return what a command, given as its words, starts on every process.

    The words may begin with variables (``OMP_NUM_THREADS=1``), as in a shell. ``gpus_per_node``: how many processes a
    launcher starts on a node where its options ask for one per GPU. Raises InputError for an unknown launcher, for
    arguments that it refuses, for fewer than 1 or too many processes, and for a script file that does not exist.
    """
    words = list(command)
    environment = {}
    while words and _ASSIGNMENT.fullmatch(words[0]):
        variable, _, value = words.pop(0).partition("=")
        environment[variable] = value
    if not words:
        raise InputError("--", "no command follows", f"write {_FORMS}")
    program, rest = Path(words[0]).name, words[1:]
    if program in ("torchrun", "torchrun.exe"):
        launch = _torchrun(rest, gpus_per_node)
    elif program == "accelerate" and rest[:1] == ["launch"]:
        launch = _accelerate(rest[1:], gpus_per_node)
    elif _PYTHON.fullmatch(program):
        launch = _python(rest, gpus_per_node)
    elif program.endswith(".py"):  # a script that is executable itself
        launch = Launched(tuple(words))
    else:
        raise InputError("--", f"{program} is no launcher that is known here", f"write {_FORMS}")
    if launch.processes is not None and not 1 <= launch.processes <= _MOST_PROCESSES:
        raise InputError("--", f"asks for {launch.processes} processes", f"1 to {_MOST_PROCESSES:,} can be recorded")
    if not launch.is_module and not Path(launch.script[0]).is_file():
        raise InputError("--", f"no script {launch.script[0]!r} here", "run it from the folder in which it runs")
    return replace(launch, environment=environment | launch.environment)


def _python(words: list[str], gpus_per_node: int) -> Launched:
    """Return what ``python`` starts, from the words after it; options before the script, or before ``-m``, are skipped.

    A launcher that is started as a module (``python -m torch.distributed.run``) is read as that launcher;
    ``gpus_per_node`` is for it. The words that were read are removed from the list ``words``. Raises InputError for
    ``-c``, and where there is no script.
    """
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "-m" and words:
            if words[0] in ("torch.distributed.run", "torch.distributed.launch"):
                return _torchrun(words[1:], gpus_per_node)
            if words[0] == "accelerate.commands.launch":
                return _accelerate(words[1:], gpus_per_node)
            return Launched(tuple(words), is_module=True)
        if option == "-c":
            raise InputError("--", "python -c has no script to record", f"write {_FORMS}")
        if option in ("-W", "-X") and words:  # these options take a word
            words.pop(0)
    if not words:
        raise InputError("--", "python without a script", f"write {_FORMS}")
    return Launched(tuple(words))


def _torchrun(words: list[str], gpus_per_node: int) -> Launched:
    """Return what ``torchrun`` starts, from the words after it, which its own parser reads.

    ``gpus_per_node``: how many processes ``--nproc-per-node`` gpu, cpu or auto starts. Raises InputError for options that
    torchrun refuses.
    """
    from torch.distributed.run import get_args_parser

    options = _parsed(get_args_parser(), words, "torchrun")
    nodes = int(str(options.nnodes).rpartition(":")[2])  # of "least:most" nodes, as many as may join
    asked_per_node = str(options.nproc_per_node)
    if asked_per_node.isdigit():
        per_node = int(asked_per_node)
    elif asked_per_node in ("gpu", "cpu", "auto"):
        per_node = gpus_per_node
    else:
        raise InputError("torchrun", f"--nproc-per-node is {asked_per_node!r}", "give a number, or gpu")
    return Launched(
        script=(options.training_script, *options.training_script_args),
        is_module=options.module,
        processes=nodes * per_node,
        per_node=per_node,
    )


def _accelerate(words: list[str], gpus_per_node: int) -> Launched:
    """Return what ``accelerate launch`` starts, from the words after it, which its own parser reads.

    ``gpus_per_node``: the number of processes where the options ask for several GPUs and give none. The configuration
    file of accelerate is not read. Raises InputError where accelerate is missing or refuses options.
    """
    try:
        from accelerate.commands.launch import launch_command_parser  # type: ignore[import-untyped]
    except ImportError:
        raise InputError("--", "accelerate is not installed here", "pip install accelerate") from None
    options = _parsed(launch_command_parser(), words, "accelerate launch")
    processes = options.num_processes or (gpus_per_node if options.multi_gpu or options.use_fsdp else 1)
    nodes = options.num_machines or 1
    environment = {"ACCELERATE_MIXED_PRECISION": options.mixed_precision or "no"}
    if options.gradient_accumulation_steps is not None:
        environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(options.gradient_accumulation_steps)
    if options.use_fsdp:
        from accelerate.utils import prepare_multi_gpu_env  # type: ignore[import-untyped]

        variables = prepare_multi_gpu_env(options)
        environment |= {name: value for name, value in variables.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    is_single = processes == 1 and not options.multi_gpu  # accelerate then starts plain python, without ranks
    return Launched(
        script=(options.training_script, *options.training_script_args),
        is_module=options.module,
        processes=None if is_single else processes,
        per_node=max(1, processes // nodes),
        environment=environment,
    )


def _parsed(parser: Any, words: list[str], name: str) -> Any:
    """Return the options that a launcher's argparse parser reads from words; ``name``: the launcher in messages.

    Raises InputError with argparse's message where it refuses them; the parser's ``error`` is replaced for that.
    """

    def refuse(message: str) -> None:
        """Raise InputError where argparse would print the usage and end the process."""
        raise InputError(name, message, f"write its options as {name} --help lists them")

    parser.error = refuse
    return parser.parse_args(words)
