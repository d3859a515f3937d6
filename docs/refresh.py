"""Bring the figures that pages show to what their commands say now.

    python docs/refresh.py README.md docs/predict.md [--fast]

Runs a page's commands as the tests of pages do (slow ones too, unless ``--fast``). A block of text below commands is compared
with what these printed: lines whose words are the same are replaced, whatever their numbers; the others stay as they are and
are told, to be mended by hand. Start at :func:`main`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from tests.house import test_docs as pages  # noqa: E402  # the way in which tests follow a page

_NUMBER = re.compile(r"\d[\d.,]*")
_RULER = re.compile(r"[─━╶-]{3,}")


def words_of(line: str) -> list[str]:
    """Return the words of a line, numbers as one sign and rulers of any length alike."""
    return _RULER.sub("─", _NUMBER.sub("#", line)).split()


def found(shown: list[str], printed: list[str]) -> list[str] | None:
    """Return the printed lines that hold the words of the shown ones, wherever lines are broken; None: there are none.

    Of several, such as the rows of a table, those that have most numbers in common.
    """
    wanted = [word for line in shown for word in words_of(line)]
    raw = [word for line in shown for word in line.split()]
    words = [(word, number) for number, line in enumerate(printed) for word in words_of(line)]
    texts = [word for word, _ in words]
    printed_raw = [word for line in printed for word in line.split()]
    best, most = None, -1
    for start in range(len(texts) - len(wanted) + 1):
        if texts[start : start + len(wanted)] != wanted:
            continue
        first, last = words[start][1], words[start + len(wanted) - 1][1]
        alike = sum(a == b for a, b in zip(raw, printed_raw[start:], strict=False))
        if (start == 0 or words[start - 1][1] < first) and alike > most:
            best, most = printed[first : last + 1], alike
    return best


def refreshed(shown: list[str], printed: list[str]) -> tuple[list[str], list[int]]:
    """Return a block with its lines as they were printed, and the places of those that were not.

    The lines between two ``...`` are looked for together, else one by one.
    """
    made: list[str] = []
    missed: list[int] = []
    start = 0
    for end, line in enumerate([*shown, "..."]):
        if line.strip() not in ("...", "…") and not line.startswith("$ "):
            continue
        run = shown[start:end]
        together = found(run, printed) if any(each.strip() for each in run) else run
        if together is None:
            for place, each in enumerate(run, start):
                alone = found([each], printed) if len(each.split()) > 1 else [each]
                made += alone or [each]
                missed += [] if alone else [place]
        else:
            made += together
        made += shown[end : end + 1]
        start = end + 1
    return [line.rstrip() for line in made], missed


def printed_by(command: str) -> list[str]:
    """Return the lines that a command prints on its standard output."""
    if command.startswith("ddltool ") and not re.search(r"[|&$<>`]", command):
        kept = io.StringIO()
        with contextlib.redirect_stdout(kept):
            pages.execute(command)
        return kept.getvalue().splitlines()
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(["bash", "-ec", command], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def refresh(page: Path, fast: bool) -> None:
    """Run a page's commands in a folder of their own, and rewrite its blocks of text."""
    lines = page.read_text(encoding="utf-8").splitlines()
    steps = pages.steps_of("\n".join(lines))
    printed: list[str] = []
    made: list[str] = []
    block: list[str] | None = None
    language, last_end, changed = "", 0, 0
    for name, text in reversed([shown for step in steps for shown in step.shown]):
        Path(name).write_text(text, encoding="utf-8")  # a page may show a file below the command that reads it
    for number, line in enumerate(lines, 1):
        for step in [step for step in steps if step.line == number]:
            for name in step.stock:
                pages.put(name)
            for name, text in step.shown:
                Path(name).write_text(text, encoding="utf-8")
            kind = step.word.partition(" ")[0]
            if step.command and (kind in ("run", "exit") or (kind == "slow" and not fast)):
                printed += printed_by(step.command)
        if block is None and line.startswith("```"):
            language, block = line[3:], []
            if language == "sh" and number - last_end > 3:
                printed = []
            made.append(line)
        elif block is not None and line == "```":
            if language in ("", "text", "console") and printed and block:
                new, missed = refreshed(block, printed)
                for place in missed:
                    print(f"{page.name}:{number - len(block) + place}: not printed: {block[place]}")
                changed += new != block
                block = new
            made += [*block, line]
            block, last_end = None, number
        elif block is not None:
            block.append(line)
        else:
            made.append(line)
    page.write_text("\n".join(made) + "\n", encoding="utf-8")
    print(f"{page.name}: {changed} blocks changed", flush=True)


def main() -> None:
    """Refresh the pages that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--fast", action="store_true", help="leave out commands that are marked as slow")
    given = parser.parse_args()
    for page in [page.resolve() for page in given.pages]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for name in ("examples", "benchmarks", "tests", "pyproject.toml"):
                Path(name).symlink_to(REPO / name)
            refresh(page, given.fast)


if __name__ == "__main__":
    main()
