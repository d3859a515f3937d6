"""The commands in docs/*.md and README.md run, page by page, in a folder that starts empty.

Every ``sh`` block is executed line by line, in order; an exit code other than 0 fails the page. Files that a page shows
(a ``yaml`` or ``python`` block whose first line is ``# NAME``) are written first, and again where the page has them. A
comment before a block says what a reader knows without it::

    <!-- run: with job.yaml telemetry.jsonl; slow: --schemes; parse: --device cuda (GPU); exit 1: --max-error -->

``with`` puts files of :data:`STOCK` there (``job.yaml=two-job.yaml`` renames). ``slow``, ``parse`` and ``exit N`` take
texts separated by ``,`` and mean the lines that hold one of them, or all lines without a text: left to ``-m slow``; never
run, because they need a GPU, a network, many minutes or somebody's data; expected to end with that code
(``slow exit N``: both). What stands later
in a comment wins. Options of every line, run or not, must be known to its command. Lines of transcripts (``$ ...``) are
parsed alone: they are of the day when they were made.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ddltool.commands.main import COMMANDS, load, run

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
_MARK = re.compile(r"<!-- run: (.*?) -->")
_FILE = re.compile(r"# ([\w.-]+\.(?:yaml|py|toml|json|txt))$")


@dataclass
class Rules:
    """What a comment says about the block after it."""

    files: list[str] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def of(self, command: str) -> str:
        """The last word that applies: "run", "slow", "parse" or "exit N"."""
        found = "run"
        for word, texts in self.texts.items():
            if not texts or any(text in command for text in texts):
                found = word
        return found


@dataclass(frozen=True)
class Step:
    """Files to put there, then a command (or none)."""

    line: int
    command: str
    word: str
    stock: tuple[str, ...] = ()
    shown: tuple[tuple[str, str], ...] = ()


def rules_of(text: str) -> Rules:
    made = Rules()
    for piece in text.split("; "):
        part = re.sub(r"\s*\([^)]*\)$", "", piece)  # the reason
        word, _, rest = (
            part.partition(":") if not part.startswith("with ") else ("with", "", part.removeprefix("with "))
        )
        if word == "with":
            made.files = rest.split()
            continue
        assert re.fullmatch(r"slow|parse|(slow )?exit [1-3]", word), f"unknown word {word!r} in <!-- run: {text} -->"
        made.texts[word] = [one.strip() for one in rest.split(",")] if rest.strip() else []
    return made


def steps_of(page: str) -> list[Step]:
    """The steps of a page's text, in order."""
    steps: list[Step] = []
    rules, language, block, start = Rules(), None, [], 0
    for number, line in enumerate(page.splitlines(), 1):
        if language is None and (mark := _MARK.fullmatch(line)):
            rules = rules_of(mark[1])
        elif language is None and line.startswith("```"):
            language, block, start = line[3:], [], number
        elif language is not None and line == "```":
            steps += _steps_of_block(language, block, start, rules)
            rules, language = Rules(), None
        elif language is not None:
            block.append(line)
    return steps


def _steps_of_block(language: str, block: list[str], start: int, rules: Rules) -> list[Step]:
    if language == "sh":
        steps = [Step(start, "", "run", stock=tuple(rules.files))]
        return steps + [Step(start + at, text, rules.of(text)) for at, text in _commands(block)]
    if language in ("yaml", "python", "toml", "json"):
        shown: dict[str, list[str]] = {}
        name = None
        for line in block:
            if match := _FILE.fullmatch(line):
                name = match[1]
            if name:
                shown.setdefault(name, []).append(line)
        files = tuple((name, "\n".join(lines) + "\n") for name, lines in shown.items())
        return [Step(start, "", "run", stock=tuple(rules.files), shown=files)]
    transcript = [line.removeprefix("$ ") for line in block if line.startswith("$ ")]
    return [Step(start, text, "parse") for text in transcript]


def _commands(block: list[str]) -> list[tuple[int, str]]:
    """The commands of a block: lines, joined where they end in a backslash, loops as a whole."""
    found: list[tuple[int, str]] = []
    open_lines: list[str] = []
    for number, line in enumerate(block, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        open_lines.append(line)
        text = "\n".join(open_lines)
        if line.endswith("\\") or (text.startswith("for ") and line.split("#")[0].strip() != "done"):
            continue
        found.append((number, text))
        open_lines = []
    assert not open_lines, f"unfinished command: {open_lines}"
    return found


# -- the files that pages take for granted

JOB = """kind: ddltool.job
name: mixed
max_workers: 8
batch_size: 32
model: zoo:cifarnet
devices:
  - {type: V100, count: 4, capability_per_s: 3.1}
  - {type: P100, count: 4, capability_per_s: 2.4}
  - {type: T4, count: 4, capability_per_s: 1.0}
"""
TWO = """kind: ddltool.job
name: two
max_workers: 4
batch_size: 16
devices:
  - {type: cpu, count: 2, capability_per_s: 5.0}
"""
MODEL = """

def make_model():
    layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
    model = nn.Sequential(nn.Sequential(*layers), nn.Linear(64, 10))
    model.example_input_array = torch.zeros(32, 64)
    return model


if __name__"""


RUN = """kind: ddltool.job
name: run
max_workers: 2
batch_size: 32
devices:
  - {type: T4, count: 1, capability_per_s: 1.0}
  - {type: V100, count: 1, capability_per_s: 3.1}
"""


def _train() -> str:
    text = (REPO / "examples" / "train_hooked.py").read_text()
    return text.replace("\n\nif __name__", MODEL, 1)


def _telemetry() -> str:
    lines = []
    sizes = {"V100": (0, 64), "T4": (1, 21)}
    for step in range(30):
        for device, (rank, size) in sizes.items():
            row = {"kind": "ddltool.telemetry", "schema_version": 1, "step": step, "rank": rank, "world_size": 2}
            row |= {"num_nodes": 1, "device": device, "batch": size, "total_batch": 85, "memory_bytes": 1e8}
            row |= {"compute_s": 0.6 + step % 3 / 100, "wait_s": 0.01, "sync_s": 0.02, "step_s": 0.65 + step % 3 / 100}
            lines.append(json.dumps(row))
    return "\n".join(lines) + "\n"


def _speeds(rows: int = 50) -> str:
    with gzip.open(REPO / "fixtures/balance/recorded-4.csv.gz", "rt") as file:
        lines = file.read().splitlines()
    return "\n".join(lines[: 1 + 4 * rows]) + "\n"


def _lengths(samples: int = 2000) -> str:
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(6, 1, samples).clip(1, 8192).astype(int)
    return "length\n" + "".join(f"{length}\n" for length in drawn)


def _cli(*arguments: str) -> None:
    assert run(list(arguments)) == 0, arguments


def _made(name: str, *before: str, arguments: tuple[str, ...]) -> None:
    for file in before:
        if not Path(file).exists():
            put(file)
    _cli(*arguments)
    assert Path(name).exists()


def _onnx() -> None:
    import onnx
    from onnx import TensorProto, helper

    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [0.0] * 4)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in "xy")
    onnx.save(helper.make_model(helper.make_graph([node], "one", [x], [y], [weight])), "model.onnx")


def _traced() -> None:
    with open("trace.json", "w") as file, contextlib.redirect_stdout(file):
        _cli(
            "trace",
            str(REPO / "fixtures/graphs/resnet32-inference.graph.json.gz"),
            "--oracle",
            "roofline",
            "--samples",
            "5",
            "--json",
        )


def _profiled(name: str) -> None:
    """Profile a few steps of the stock train.py's model."""
    import runpy

    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    model = runpy.run_path("train.py")["make_model"]()
    plan = schedule(wait=1, warmup=1, active=3, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=lambda done: done.export_chrome_trace(name)
    ) as watched:
        for _ in range(6):
            # So many samples that the ops take longer than torch takes to start them on a busy machine.
            nn.functional.cross_entropy(model(torch.zeros(4096, 64)), torch.zeros(4096, dtype=torch.long)).backward()
            watched.step()


def _of_two() -> None:
    """The same trace as if two processes had run."""
    put("profiled.json.gz")
    with gzip.open("profiled.json.gz", "rt") as file:
        document = json.load(file)
    header = {"distributedInfo": {"rank": 0, "world_size": 2}, "deviceProperties": [{"name": "T4"}]}
    with gzip.open("rank0.json.gz", "wt") as file:
        json.dump({**header, **document, **header}, file)  # the header stands before the events, as torch writes it


STOCK: dict[str, Callable[[], Any]] = {
    "job.yaml": lambda: Path("job.yaml").write_text(JOB),
    "two-job.yaml": lambda: Path("two-job.yaml").write_text(TWO),
    "train.py": lambda: Path("train.py").write_text(_train()),
    "telemetry.jsonl": lambda: Path("telemetry.jsonl").write_text(_telemetry()),
    "trace.csv": lambda: Path("trace.csv").write_text(_speeds()),
    "lengths.csv": lambda: Path("lengths.csv").write_text(_lengths()),
    "times.csv": lambda: shutil.copy(REPO / "fixtures/barrier/times.csv", "times.csv"),
    "workload.csv": lambda: shutil.copy(REPO / "fixtures/workloads/synthetic.csv", "workload.csv"),
    "cluster.yaml": lambda: shutil.copy(REPO / "fixtures/workloads/cluster.yaml", "cluster.yaml"),
    "traces": lambda: shutil.copytree(REPO / "fixtures/workloads/traces", "traces"),
    "placements.csv": lambda: shutil.copy(
        sorted((REPO / "fixtures/workloads/traces/vision").glob("placements*.csv"))[0], "placements.csv"
    ),
    "scalability.csv": lambda: Path("scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n2,4,16,0.06,0.02\n4,8,16,0.07,0.03\n4,16,32,0.09,0.04\n"
    ),
    "model.onnx": _onnx,
    "plan.json": lambda: _made(
        "plan.json", "job.yaml", arguments=("plan", "job.yaml", "--strategy", "est", "-o", "plan.json")
    ),
    "graph.json": lambda: _made("graph.json", arguments=("trace", "zoo:cifarnet", "--device", "T4", "-o", "graph.json")),
    "trace.json": _traced,
    "predictions.csv": lambda: Path("predictions.csv").write_text(
        "worker,iteration,end_s\n" + "".join(f"w{w},{k},{k * (1 + w / 3):.3f}\n" for w in range(3) for k in range(1, 12))
    ),
    "run-job.yaml": lambda: Path("run-job.yaml").write_text(RUN),
    "run-plan.json": lambda: _made(
        "run-plan.json", "run-job.yaml", arguments=("plan", "run-job.yaml", "--strategy", "bsp", "-o", "run-plan.json")
    ),
    "profiled.json.gz": lambda: _profiled("profiled.json.gz"),
    "rank0.json.gz": _of_two,
    "profile.csv": lambda: _made(
        "profile.csv",
        arguments=(
            "predict", "zoo:cifarnet", "--device", "T4", "--batch-sizes", "16,64,256", "--replicas", "1,2,4",
            "-o", "profile.csv",
        ),
    ),
    "goodput.json": lambda: _made("goodput.json", "profile.csv", arguments=("fit", "profile.csv", "-o", "goodput.json")),
    "fixtures": lambda: Path("fixtures/graphs").mkdir(parents=True),
}  # fmt: skip


def put(name: str) -> None:
    """Put a stock file into the working folder; ``NAME=STOCK`` renames it, folders included."""
    target, _, stock = name.partition("=")
    stock = stock or target
    if not Path(stock).exists():
        STOCK[stock]()
    if stock != target:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stock, target)


# -- running


def execute(command: str) -> int:
    """The exit code of a command line; ``ddltool`` alone runs in this process, everything else in bash."""
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError:
        words = []
    words = words[1:] if words[:1] == ["time"] else words
    if words[:1] == ["ddltool"] and not re.search(r"[|&$<>`]", " ".join(words[1:]).replace("<=", "").replace(">=", "")):
        spread = [name for word in words[1:] for name in (sorted(glob.glob(word)) if "*" in word else []) or [word]]
        return run(spread)
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(["bash", "-ec", command], env=environment, start_new_session=True)
    try:
        return process.wait(timeout=900)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def follow(page: Path, words: tuple[str, ...]) -> None:
    """Do a page's steps in the working folder, those that are marked with one of ``words``."""
    for name in ("examples", "benchmarks", "tests", "pyproject.toml"):
        Path(name).symlink_to(REPO / name)
    steps = steps_of(page.read_text())
    for name, text in reversed([shown for step in steps for shown in step.shown]):
        Path(name).write_text(text)  # a page may show a file below the command that reads it
    for step in steps:
        for name in step.stock:
            put(name)
        for name, text in step.shown:
            Path(name).write_text(text)
        kind = step.word.partition(" ")[0]
        code = re.sub(r"\D", "", step.word)
        if step.command and kind in words:
            assert execute(step.command) == int(code or 0), f"{page.name}:{step.line}: {step.command}"


def has(page: Path, word: str) -> bool:
    return any(step.command and step.word.partition(" ")[0] == word for step in steps_of(page.read_text()))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if has(page, "run") or has(page, "exit")], ids=lambda p: p.stem
)
def test_fast_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow(page, ("run", "exit"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has(page, "slow")], ids=lambda p: p.stem)
def test_all_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow(page, ("run", "exit", "slow"))


# -- parsing


@functools.cache
def _command(name: str) -> Any:
    return load(name)


def check_options(command: str) -> None:
    """Fail for an option, subcommand, script or test file that there is not."""
    for part in re.split(r"&&|\||;|\bdo\b", command.replace("\\\n", " ")):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue
        while words and (words[0] == "time" or re.fullmatch(r"\w+=\S*", words[0])):
            words = words[1:]
        if words[:1] == ["ddltool"]:
            count = 2 if " ".join(words[1:3]) in COMMANDS else 1
            command_of = _command(" ".join(words[1 : 1 + count]))
            command_of.make_parser(command_of.context_class(command_of)).parse_args(list(words[1 + count :]))
        elif words[:1] == ["torchrun"]:
            from torch.distributed.run import get_args_parser

            known = get_args_parser().parse_args(words[1:])
            rest = [known.training_script, *known.training_script_args]
            assert "--" not in known.training_script[:2]
            check_options(shlex.join(rest if known.module and rest[0] == "ddltool" else ["python", *rest]))
        elif words[:1] == ["python"] and words[1].partition("/")[0] in ("examples", "benchmarks"):
            source = (REPO / words[1]).read_text()
            for word in words[2:]:
                assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in source, f"{words[1]} has no {word}"
        elif words[:1] == ["pytest"]:
            for word in words[1:]:
                assert not word.startswith("tests/") or list(REPO.glob(word)), f"no {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_option_is_known(page: Path) -> None:
    for step in steps_of(page.read_text()):
        try:
            check_options(step.command)
        except Exception as error:
            raise AssertionError(f"{page.name}:{step.line}: {step.command}: {error}") from error


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (
        *("ddltool plan job.yaml --stratgy est", "ddltool plna job.yaml"),
        *("torchrun --nprocs 2 examples/train_plain.py", "python benchmarks/table1.py --no-such"),
        *("for x in a; do ddltool show zoo --jsn; done", "ddltool show zoo && ddltool show zoo --jsn"),
    ):
        with pytest.raises((Exception, SystemExit)):
            check_options(wrong)
    page = tmp_path / "page.md"
    page.write_text(
        "```yaml\n# a.yaml\n{}\n```\n<!-- run: exit 2: missing; parse: never (a GPU) -->\n```sh\nddltool plan a.yaml\n```\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="page.md:7: ddltool plan a.yaml"):
        follow(page, ("run", "exit"))


def test_marks_are_read() -> None:
    text = (
        "<!-- run: with job.yaml; slow: --b, --c; exit 1: --d; parse: --e (GPU) -->\n"
        "```sh\nx --a  # --z\n# words\nx --b\nx --c \\\n  more\nx --d\nx --e\nfor i in 1; do\n  y\ndone\n```\n"
        "```sh\nx --e\n```\n"
        "```text\n$ ddltool show zoo\nline\n```\n"
    )
    found = [(step.line, step.command, step.word) for step in steps_of(text) if step.command]
    assert found == [
        (3, "x --a  # --z", "run"), (5, "x --b", "slow"), (7, "x --c \\\n  more", "slow"), (8, "x --d", "exit 1"),
        (9, "x --e", "parse"), (12, "for i in 1; do\n  y\ndone", "run"), (15, "x --e", "run"),
        (17, "ddltool show zoo", "parse"),
    ]  # fmt: skip
    assert steps_of(text)[0].stock == ("job.yaml",)


def test_every_mark_stands_before_a_block() -> None:
    """A comment that is misspelt or out of place would mean nothing."""
    for page in PAGES:
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines):
            if "<!-- run" in line:
                assert _MARK.fullmatch(line), f"{page.name}:{number + 1}"
                assert lines[number + 1].startswith("```"), f"{page.name}:{number + 1}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_no_cell_of_a_table_is_longer_than_two_lines(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for line in re.findall(r"^\|.*", text, re.M):
        cells = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).split("|")
        assert max(map(len, cells)) <= 242, f"{page.name}: {max(cells, key=len)}"


ELSEWHERE = {
    "plan": "decide",
    "simulate sweep": "sweep",
    "simulate trials": "trials",
    "simulate autoscale": "autoscale",
    "simulate advise": "advise",
}
NO_ANSWER = {"calibrate", "profile", "report", "show", "sweep", "watch"}
"""Pages whose example measures here for minutes, writes a page, or answers further down."""


@pytest.mark.parametrize("name", sorted({ELSEWHERE.get(name, name.partition(" ")[0]) for name in COMMANDS}))
def test_a_commands_page_opens_with_its_question_an_example_and_the_answer(name: str) -> None:
    page = (REPO / "docs" / f"{name}.md").read_text()
    question, fence, rest = page.partition("\n```")
    assert fence, name
    assert "?" in question, name
    assert len(question.split()) <= 80, name
    assert re.match(r"(sh|console|python|yaml)\n", rest), name
    opening = page.partition("\n## ")[0]
    if name not in NO_ANSWER:
        has_output = re.search(
            r"^```(text|console)?$",
            re.sub(r"^```(sh|yaml|python|json)\n.*?^```$", "", opening, flags=re.M | re.S),
            re.M,
        )
        assert has_output or re.search(r"^(\||!\[)", opening, re.M), f"{name} has no answer before its first section"
