"""The pytest plugin: artifacts of a folder as fixtures, and ``assert_gate`` against committed baselines.

pytest finds it by its entry point where ddltool is installed. Nothing of ddltool is imported until a test uses a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pytest

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.gating.metrics import Figures
    from ddltool.analyzers.gating.rules import Rule
    from ddltool.graph import Graph
    from ddltool.plan import Plan
    from ddltool.results import GateResult

DEFAULT_FOLDER = "ddltool-baselines"
T = TypeVar("T")
# Path of each baseline that this run wrote -> the test that did.
_WRITTEN = pytest.StashKey[dict[str, str]]()


class AssertGate(Protocol):
    """What the fixture ``assert_gate`` is."""

    def __call__(
        self, current: Any, baseline_name: str, rules: Sequence[str] | None = None, *, level: float | None = None
    ) -> GateResult:
        """Hold an artifact against the baseline of that name; the test fails with the checks that failed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--ddltool-dir`` and ``--ddltool-update``, and the ini option ``ddltool_dir``."""
    group = parser.getgroup("ddltool", "gates on ddltool artifacts")
    group.addoption(
        "--ddltool-dir",
        metavar="DIR",
        help=f"folder of artifacts and baselines (default: ini ddltool_dir, else {DEFAULT_FOLDER})",
    )
    group.addoption(
        "--ddltool-update",
        action="store_true",
        help="accept what the tests give to assert_gate as the new baselines",
    )
    parser.addini("ddltool_dir", f"folder of artifacts and baselines, relative to the root ({DEFAULT_FOLDER})")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the list of baselines that this run writes."""
    config.stash[_WRITTEN] = {}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which baselines were written."""
    written = config.stash[_WRITTEN]
    for line in written:
        terminalreporter.write_line(f"ddltool: wrote baseline {line}")


@pytest.fixture(scope="session")
def ddltool_dir(pytestconfig: pytest.Config) -> Path:
    """The folder of artifacts and baselines; relative paths count from pytest's root folder."""
    option = pytestconfig.getoption("--ddltool-dir")
    if option:
        return Path(pytestconfig.invocation_params.dir, option)
    return Path(pytestconfig.rootpath, pytestconfig.getini("ddltool_dir") or DEFAULT_FOLDER)


@pytest.fixture(scope="session")
def ddltool_graph(ddltool_dir: Path) -> Callable[[str], Graph]:
    """Read a graph of the folder by name: ``ddltool_graph("resnet50.graph.json.gz")``."""

    def read(name: str) -> Graph:
        from ddltool.graph_io import read_graph

        return _told(lambda: read_graph(_inside(ddltool_dir, name)))

    return read


@pytest.fixture(scope="session")
def ddltool_plan(ddltool_dir: Path) -> Callable[[str], Plan]:
    """Read a plan of the folder by name: ``ddltool_plan("plan.json")``."""

    def read(name: str) -> Plan:
        from ddltool.artifacts import load
        from ddltool.plan import Plan

        return _told(lambda: load(_inside(ddltool_dir, name), Plan))

    return read


@pytest.fixture(scope="session")
def ddltool_profile(ddltool_dir: Path) -> Callable[[str], pd.DataFrame]:
    """Read a profile of the folder by name: ``ddltool_profile("profile.csv")``."""

    def read(name: str) -> pd.DataFrame:
        from ddltool.profile import read_profile

        return _told(lambda: read_profile(_inside(ddltool_dir, name)))

    return read


@pytest.fixture
def assert_gate(ddltool_dir: Path, pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> AssertGate:
    """Hold an artifact against a committed baseline: ``assert_gate(current, "plan.json", rules=[...])``.

    ``current``: a path, a Graph, a profile as a DataFrame, an artifact such as a Plan, or a JSON document with its kind.
    Without rules those of ``ddltool.toml`` in pytest's root folder hold, else the defaults of the kind. With
    ``--ddltool-update`` the current artifact becomes the baseline, unless it breaks an absolute limit, the baseline is of
    another kind, or another test of this run has written it.
    """

    def gate(
        current: Any, baseline_name: str, rules: Sequence[str] | None = None, *, level: float | None = None
    ) -> GateResult:
        __tracebackhide__ = True
        target = _told(lambda: _inside(ddltool_dir, baseline_name))
        update = bool(pytestconfig.getoption("--ddltool-update"))
        verdict = _told(lambda: _judge(current, target, rules or (), level, update, pytestconfig.rootpath))
        if not verdict.passed:
            from ddltool.analyzers.gating.formats import sentence

            failed = "\n".join(f"  {sentence(check)}" for check in verdict.failed)
            hint = "" if update else "\nto accept it: pytest --ddltool-update"
            count = f"{len(verdict.failed)} of {len(verdict.checks)}"
            pytest.fail(f"{count} checks failed against {target}:\n{failed}{hint}", pytrace=False)
        if update:
            written, name = pytestconfig.stash[_WRITTEN], request.node.nodeid
            _told(lambda: _write_once(current, target, written, name))
        return verdict

    return gate


def _told(call: Callable[[], T]) -> T:
    """Return what the call returns; what ddltool can explain fails the test in that one line."""
    from ddltool.errors import DdlToolError

    __tracebackhide__ = True
    try:
        return call()
    except DdlToolError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a name in the folder. Raises InputError for a name that leads out of it."""
    from ddltool.errors import InputError

    path = folder / name
    if not name or not path.resolve().is_relative_to(folder.resolve()) or path.resolve() == folder.resolve():
        raise InputError("baseline", f"{name!r} is not inside {folder}", "give the name of a file in that folder")
    return path


def _judge(
    current: Any, target: Path, texts: Sequence[str], level: float | None, update: bool, root: Path
) -> GateResult:
    """Return the verdict; with ``update`` the current artifact is its own baseline, so that absolute limits still hold."""
    from ddltool.analyzers.gating.gate import LEVEL, judge
    from ddltool.analyzers.gating.metrics import extract
    from ddltool.commands.gate import CONFIG_NAME, figures_of, read_config, rules_for
    from ddltool.errors import InputError

    found = extract(_document(current), "current")
    config = read_config(root / CONFIG_NAME) if (root / CONFIG_NAME).is_file() else None
    rules: list[Rule]
    rules, origin = rules_for(found.kind, texts, config)
    if not update and not target.is_file():
        raise InputError(str(target), "no such baseline", "write it with: pytest --ddltool-update")
    before = _replaced(target, found) if update else figures_of([target])
    if before.kind != found.kind:
        raise InputError(str(target), f"is a {before.kind}", f"the current artifact is a {found.kind}")
    before = found if update else before
    chosen = level if level is not None else config.level if config is not None and config.level else LEVEL
    return judge(rules, found.metrics, before.metrics, level=chosen, where="rules" if texts else origin)


def _replaced(target: Path, found: Figures) -> Figures:
    """Return the figures of the baseline that an update replaces; those of the current artifact where it has none."""
    from ddltool.commands.gate import figures_of
    from ddltool.errors import InputError

    try:
        return figures_of([target]) if target.exists() else found
    except InputError:
        return found  # a broken baseline is what an update is for


def _write_once(current: Any, target: Path, written: dict[str, str], name: str) -> None:
    """Write the baseline, unless another test of this run did: only the last of them would ever be compared."""
    from ddltool.errors import InputError

    place = str(target.resolve())
    first = written.get(place, name)
    if first != name:
        raise InputError(str(target), f"is the baseline of {first} too", "give each test a baseline of its own")
    _write(current, target)
    written[place] = name


def _document(current: Any) -> Mapping[str, Any]:
    """Return an artifact, whatever it is held in, as a document with its kind."""
    import pandas as pd
    from pydantic import BaseModel

    from ddltool.commands.artifact_reading import checked_document, profile_document, read_artifact
    from ddltool.errors import InputError
    from ddltool.graph import Graph
    from ddltool.graph_io import to_document

    if isinstance(current, (str, Path)):
        return read_artifact(Path(current))
    if isinstance(current, Graph):
        return to_document(current)
    if isinstance(current, pd.DataFrame):
        return profile_document(current, "current")
    if isinstance(current, BaseModel):
        return current.model_dump(mode="json")
    if isinstance(current, Mapping):
        return checked_document(dict(current), "current")
    problem = f"cannot gate a {type(current).__name__}"
    raise InputError("current", problem, "give a path, a Graph, a DataFrame, an artifact or a document")


def _write(current: Any, target: Path) -> None:
    """Write the baseline atomically, in the form that its name says."""
    import pandas as pd
    from pydantic import BaseModel

    from ddltool.artifacts import read_text, save, write_text
    from ddltool.commands.artifact_reading import is_table
    from ddltool.errors import InputError
    from ddltool.profile import write_profile

    is_file = isinstance(current, (str, Path))
    tabular = is_table(Path(current)) if is_file else isinstance(current, pd.DataFrame)
    if tabular != is_table(target):
        remedy = "name it .csv" if tabular else "name it .json"
        raise InputError(str(target), f"is not the name of a {'table' if tabular else 'document'}", remedy)
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_file:
        write_text(target, read_text(current))
    elif isinstance(current, pd.DataFrame):
        write_profile(current, target)
    else:
        save(current if isinstance(current, BaseModel) else dict(_document(current)), target)
