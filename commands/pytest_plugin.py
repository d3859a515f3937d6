"""The pytest plugin: artifacts of a folder as fixtures, and ``assert_gate`` against committed baselines.

pytest finds it by its entry point where ddltool is installed. Nothing heavy is imported until a test uses a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from ddltool.errors import DdlToolError, InputError

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.graph import Graph
    from ddltool.plans import Plan
    from ddltool.results import GateResult

DEFAULT_FOLDER = "ddltool-baselines"
T = TypeVar("T")
# By the resolved path of a baseline that this run wrote: the test that wrote it.
_WRITTEN = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--ddltool-dir`` and ``--ddltool-update``, and the ini option ``ddltool_dir``."""
    group = parser.getgroup("ddltool", "gates on ddltool artifacts")
    group.addoption(
        "--ddltool-dir",
        metavar="DIR",
        help=f"folder of artifacts and baselines (default: ini ddltool_dir, else {DEFAULT_FOLDER})",
    )
    group.addoption(
        "--ddltool-update", action="store_true", help="accept what the tests give to assert_gate as the new baselines"
    )
    parser.addini("ddltool_dir", f"folder of artifacts and baselines, relative to the root ({DEFAULT_FOLDER})")


def pytest_configure(config: pytest.Config) -> None:
    """Start this run's record of written baselines."""
    config.stash[_WRITTEN] = {}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print at the end of the run the baselines that were written."""
    for line in config.stash[_WRITTEN]:
        terminalreporter.write_line(f"ddltool: wrote baseline {line}")


@pytest.fixture(scope="session")
def ddltool_dir(pytestconfig: pytest.Config) -> Path:
    """The folder of artifacts and baselines.

    A relative ``--ddltool-dir`` counts from the folder where pytest was started, the ini option from pytest's root folder.
    """
    option = pytestconfig.getoption("--ddltool-dir")
    if option:
        return Path(pytestconfig.invocation_params.dir, option)
    return Path(pytestconfig.rootpath, pytestconfig.getini("ddltool_dir") or DEFAULT_FOLDER)


@pytest.fixture(scope="session")
def ddltool_graph(ddltool_dir: Path) -> Callable[[str], Graph]:
    """Read a graph of the folder by name: ``ddltool_graph("resnet50.graph.json.gz")``."""
    from ddltool.graph import read_graph

    return lambda name: _or_fail(lambda: read_graph(_inside(ddltool_dir, name)))


@pytest.fixture(scope="session")
def ddltool_plan(ddltool_dir: Path) -> Callable[[str], Plan]:
    """Read a plan of the folder by name: ``ddltool_plan("plan.json")``."""
    from ddltool.artifacts import load
    from ddltool.plans import Plan

    return lambda name: _or_fail(lambda: load(_inside(ddltool_dir, name), Plan))


@pytest.fixture(scope="session")
def ddltool_profile(ddltool_dir: Path) -> Callable[[str], pd.DataFrame]:
    """Read a profile of the folder by name: ``ddltool_profile("profile.csv")``."""
    from ddltool.profiles import read_profile

    return lambda name: _or_fail(lambda: read_profile(_inside(ddltool_dir, name)))


@pytest.fixture
def assert_gate(
    ddltool_dir: Path, pytestconfig: pytest.Config, request: pytest.FixtureRequest
) -> Callable[..., GateResult]:
    """Compare an artifact with a committed baseline: ``assert_gate(current, "plan.json", rules=[...], level=0.05)``.

    ``current``: a path, a Graph, a profile as a DataFrame, an artifact such as a Plan, or a JSON document with its kind.
    Without ``rules`` those of ``ddltool.toml`` in pytest's root folder are used, else the defaults of the kind. With
    ``--ddltool-update`` the current artifact becomes the baseline, unless it breaks an absolute limit, the baseline is of
    another kind, or another test of this run has written it.
    """
    from ddltool.analyzers.answers.gating.formats import sentence
    from ddltool.analyzers.answers.gating.verdict import CONFIG_NAME, check_against, write_baseline

    update, config = bool(pytestconfig.getoption("--ddltool-update")), pytestconfig.rootpath / CONFIG_NAME
    written, here = pytestconfig.stash[_WRITTEN], request.node.nodeid

    def write_once(current: Any, target: Path) -> None:
        """Write the current artifact as the baseline ``target``. Raises InputError if another test has written it."""
        first = written.get(str(target.resolve()), here)
        if first != here:  # the baseline of the first test would be lost
            raise InputError(str(target), f"is the baseline of {first} too", "give each test a baseline of its own")
        write_baseline(current, target)
        written[str(target.resolve())] = here

    def gate(
        current: Any, baseline_name: str, rules: Sequence[str] | None = None, *, level: float | None = None
    ) -> GateResult:
        """Return the verdict on ``current``, or fail the test with a line for each failed check.

        ``baseline_name``: a file in the folder of baselines, which ``--ddltool-update`` writes. ``rules`` and ``level``:
        None: the configured ones.
        """
        __tracebackhide__ = True
        target = _or_fail(lambda: _inside(ddltool_dir, baseline_name))
        verdict = _or_fail(lambda: check_against(current, target, rules or (), level, update=update, config=config))
        if not verdict.passed:
            failed = "\n".join(f"  {sentence(check)}" for check in verdict.failed)
            hint = "" if update else "\nto accept it: pytest --ddltool-update"
            count = f"{len(verdict.failed)} of {len(verdict.checks)}"
            pytest.fail(f"{count} checks failed against {target}:\n{failed}{hint}", pytrace=False)
        if update:
            _or_fail(lambda: write_once(current, target))
        return verdict

    return gate


def _or_fail(call: Callable[[], T]) -> T:
    """Return the result of ``call``; a DdlToolError from it fails the test with its one line, without a traceback."""
    __tracebackhide__ = True
    try:
        return call()
    except DdlToolError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _inside(folder: Path, name: str) -> Path:
    """Return the path of the file ``name`` in the folder. Raises InputError for a name that leads out of the folder."""
    path = folder / name
    if not name or not path.resolve().is_relative_to(folder.resolve()) or path.resolve() == folder.resolve():
        raise InputError("baseline", f"{name!r} is not inside {folder}", "give the name of a file in that folder")
    return path
