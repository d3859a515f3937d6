"""The house keeps its shape: arrows point downwards, imports are light, everything is packaged and documented."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("commands", "runtime", "analyzers", "fixtures", "toolkit")
STEP = tuple(f"step.{name}" for name in ("recording", "tracing", "measured", "communication", "costs", "transfers"))
JOB = tuple(f"job.{name}" for name in ("goodput", "barriers", "balancing", "placement", "planning", "diagnosing"))
ANSWERS = tuple(f"answers.{name}" for name in ("gating", "emitting", "reporting"))
ANALYZERS = tuple(f"analyzers.{name}" for name in (*STEP, *JOB, "cluster", *ANSWERS))
RUNTIME = tuple(
    f"runtime.{name}"
    for name in ("processes", "hook", "measuring", "elastic", "servers", "balancing", "agent", "integrations")
)
LAYERS = ("toolkit", "fixtures", *ANALYZERS, *RUNTIME, "runtime", "commands")
"""Every package, the lowest first: each may import those before it."""
APART: dict[str, set[str]] = {
    **{name: {"fixtures"} for name in ANALYZERS},
    **{name: {"fixtures", *(f"analyzers.{answer}" for answer in ANSWERS)} for name in (*RUNTIME, "runtime")},
}
"""Packages that stand lower and are none of one's business all the same."""
EXEMPT = {
    # What a user names as zoo:NAME ships; who resolves names looks there, and nobody else.
    ("ddltool.analyzers.step.tracing.sources", "ddltool.fixtures.zoo")
}
# The doors belong to the package: `python -m ddltool` hands over to the command line, `import ddltool` to the functions.
DOORS = {"ddltool", "ddltool.__main__"}


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def package_of(module: str) -> str:
    """The package of a module: of analyzers and runtime the part, such as ``analyzers.step.costs``."""
    parts = module.split(".")[1:]
    if not parts or parts[0] not in ROOMS:
        return "toolkit"
    if parts[0] not in ("analyzers", "runtime"):
        return parts[0]
    return next((name for name in (".".join(parts[:3]), ".".join(parts[:2])) if name in LAYERS), parts[0])


def imported_modules(path: Path, known: Collection[str], *, at_top_only: bool = False) -> set[str]:
    """Modules of ours that a file imports: at its top, inside functions, or by a string that names one."""
    names: set[str] = set()
    for node in tree_of(path).body if at_top_only else ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {
                full if (full := f"{node.module}.{alias.name}") in known else str(node.module) for alias in node.names
            }
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(".") > 1:
            names.add(node.value.partition(":")[0])
    return names & set(known)


def arrows(modules: Mapping[str, Path]) -> set[tuple[str, str]]:
    """(importer, imported) over all modules but the doors."""
    return {
        (name, other)
        for name, path in modules.items()
        if name not in DOORS
        for other in imported_modules(path, modules) - {name}
    }


def wrong_arrows(found: Collection[tuple[str, str]]) -> list[str]:
    """Those that lead up, or where they have no business."""
    wrong = []
    for name, other in sorted(set(found) - EXEMPT):
        here, there = package_of(name), package_of(other)
        if here != there and (LAYERS.index(there) > LAYERS.index(here) or there in APART.get(here, set())):
            wrong.append(f"{name} imports {other}: {here} -> {there}")
    return wrong


@cache
def house() -> dict[str, Path]:
    return {module_name(path): path for path in sources()}


@cache
def house_arrows() -> set[tuple[str, str]]:
    return arrows(house())


def test_every_package_has_its_layer() -> None:
    parts = {package_of(name) for name in house()}
    assert parts <= {*LAYERS, "analyzers"}
    assert {*LAYERS} - parts == set()


def test_imports_point_downwards() -> None:
    assert wrong_arrows(house_arrows()) == []


def circles(found: Collection[tuple[str, str]]) -> list[list[str]]:
    """Those of packages that know each other, and of modules that do, if only inside a function."""
    import networkx

    packages = {(package_of(a), package_of(b)) for a, b in found if package_of(a) != package_of(b)}
    return [circle for graph in (packages, found) for circle in networkx.simple_cycles(networkx.DiGraph(list(graph)))]


def test_no_circles() -> None:
    """The doors count with what they load at once: what they fetch by name may in turn ask them for the version."""
    loaded = {(door, other) for door in DOORS for other in imported_modules(house()[door], house(), at_top_only=True)}
    assert circles(loaded | (house_arrows() - EXEMPT)) == []


@pytest.mark.parametrize(
    ("places", "found"),
    [
        (("ddltool.analyzers.job.goodput.a", "ddltool.analyzers.job.goodput.b"), 1),
        (("ddltool.analyzers.step.costs.a", "ddltool.analyzers.job.goodput.b"), 2),  # of packages, and of modules
    ],
)
def test_the_rule_on_circles_can_fail(tmp_path: Path, places: tuple[str, str], found: int) -> None:
    modules = {place: tmp_path / f"{place}.py" for place in places}
    modules[places[0]].write_text(f"from {places[1]} import g\n")
    modules[places[1]].write_text(f"def g():\n    from {places[0]} import f\n")
    assert len(circles(arrows(modules))) == found


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("ddltool.graph", "from ddltool.commands.main import run\n"),
        ("ddltool.analyzers.step.costs.model", "from ddltool.analyzers.job.goodput import fit\n"),
        ("ddltool.analyzers.job.goodput.fit", "def f():\n    from ddltool.analyzers.cluster.job import SimulatedJob\n"),
        ("ddltool.artifacts", 'PLACE = "ddltool.analyzers.answers.reporting.notebook"\n'),
        ("ddltool.runtime.processes.batches", "import ddltool.analyzers.answers.gating.rules\n"),
        ("ddltool.analyzers.cluster.job", "from ddltool.fixtures.zoo import build\n"),
    ],
)
def test_the_import_rule_can_fail(tmp_path: Path, place: str, text: str) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(text)
    assert len(wrong_arrows({(place, other) for other in imported_modules(bad, house())})) == 1


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = (["ddltool"] if parts[0] == "toolkit" else ["ddltool", parts[0]]) + parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def names_made(path: Path) -> set[str]:
    """What functions, classes and values a file has at its top."""
    targets = [node.targets if isinstance(node, ast.Assign) else [node] for node in tree_of(path).body]
    return {str(getattr(one, "name", getattr(one, "id", ""))) for each in targets for one in each}


def test_examples_and_benchmarks_use_what_is_there() -> None:
    """Most run seldom; nothing else tells that a module lost what they call."""
    modules = house()
    for path in (*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")):
        nodes = list(ast.walk(tree_of(path)))
        taken = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module in modules]
        names = {alias.asname or alias.name: (str(node.module), alias.name) for node in taken for alias in node.names}
        whole = {here: ".".join(full) for here, full in names.items() if ".".join(full) in modules}
        used = {full for here, full in names.items() if here not in whole}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
                used.add((whole[node.value.id], node.attr))
        for module, name in used:
            is_made = name in names_made(modules[module]) or f"{module}.{name}" in modules
            assert is_made or hasattr(importlib.import_module(module), name), f"{path.name} uses {module}.{name}"


def test_every_folder_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {module_name(path.parent / "__init__.py") for path in sources()}
    assert set(settings["packages"]) == folders
    for package, folder in settings["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file(), package


def test_the_lock_holds_what_development_needs() -> None:
    """Every need of [dev], of its extras and of the package itself, in its range, with hashes; and as constraints.txt."""

    def pinned(name: str) -> dict[str, tuple[str, str]]:
        text = re.sub(r"^ *#.*\n", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M)
        found = re.findall(r"^([\w.-]+)==([^\s;]+)(.*?)(?=^\S|\Z)", text, flags=re.M | re.S)
        return {canonicalize_name(package): (version, rest) for package, version, rest in found}

    locked, project = pinned("requirements-dev.lock"), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs, extras, met = list(project["dependencies"]), {"dev"}, set()
    while extras - met:
        met.add(extra := min(extras - met))
        for need in map(Requirement, project["optional-dependencies"][extra]):
            extras |= need.extras if need.name == "ddltool" else set()
            needs += [] if need.name == "ddltool" else [str(need)]
    assert len(needs) > 30
    for need in map(Requirement, needs):
        version, rest = locked[canonicalize_name(need.name)]
        assert need.specifier.contains(version), f"{need} and {version}: make lock"
        assert "--hash=sha256:" in rest, need.name
    held = {name: version for name, (version, _) in pinned("constraints.txt").items() if name in locked}
    assert len(held) > 90
    assert held == {name: locked[name][0] for name in held}, "make lock"


def test_every_file_compiles() -> None:
    """Those of the tests are compiled where they are collected."""
    others = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert others
    for path in [*sources(), *others]:
        compile(tree_of(path), str(path), "exec")


HEAVY = (
    *("torch", "pandas", "ortools", "networkx", "onnx", "scipy", "altair", "vl_convert", "sklearn"),
    *("numpy", "pydantic"),
)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_line_imports_nothing_heavy(option: str) -> None:
    code = (
        "import sys\nfrom ddltool.commands.main import run\n"
        f"assert run([{option!r}]) == 0\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_each_subcommand_is_documented() -> None:
    """A page that shows it, and words on each option for ``--help``, of which the site's reference is made."""
    from ddltool.commands.main import COMMANDS, load

    for name in COMMANDS:
        command, (first, _, second) = load(name), name.partition(" ")
        pages = [page for word in (second, first) if (page := ROOT / "docs" / f"{word}.md").is_file()]
        assert command.help, name
        texts = [page.read_text(encoding="utf-8") for page in pages]
        assert any(f"ddltool {name}" in text for text in texts), f"{pages} do not show ddltool {name}"
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"ddltool {name}: {parameter.opts} has no help"


def test_public_functions_have_docstrings() -> None:
    for path in sources():
        for node in tree_of(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.relative_to(ROOT)}: {node.name}"


def test_the_page_of_the_house_names_what_is_there() -> None:
    """Where to start reading, and the steps of the ways through the rooms: at most eight each."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = re.findall(r"^\| `([a-z/]+)/` \|.*\| ([^|]+) \|$", page, flags=re.MULTILINE)
    ways = re.findall(r"`([a-z_/]+\.py)`(?:: `(\w+)`)?", page)
    assert len(re.findall(r"^\| \d \|", page, flags=re.MULTILINE)) <= 8
    starts = [
        (f"{package}/{file}", name)
        for package, cell in packages
        for file, name in re.findall(r"`(\w+)(?:\.(\w+))?`", cell)
    ]
    assert len(ways) >= 20
    assert len(starts) >= 40
    for path, name in [*starts, *((file.removesuffix(".py"), name) for file, name in ways)]:
        places = [ROOT / top / f"{path}{ending}" for top in ("", "analyzers", "runtime") for ending in (".py", "")]
        assert any(place.exists() for place in places), f"{path} is not there"
        texts = [place.read_text() for place in places if place.is_file()]
        made = re.compile(rf"^(def|class) {name}\b|^{name} =", re.MULTILINE)
        assert not name or any(map(made.search, texts)), f"{path} has no {name}"


def test_the_picture_of_the_house_is_that_of_the_page() -> None:
    """Every package has its place, lower ones further down, and the numbers in it are the steps of the ways through it."""
    boxes = ElementTree.parse(ROOT / "docs" / "rooms.svg").getroot().findall("{*}g")
    drawn = {(box.get("id"), text.get("class"), text.text) for box in boxes for text in box.findall("{*}text[@class]")}
    page = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^\| (\d) \| `([\w/]+)\.py`.*?`([\w/]+)\.py`.*?`([\w/]+)\.py`", page, flags=re.MULTILINE)
    places = {
        f"{name.removeprefix('analyzers.').replace('.', '/')}/": name.removeprefix("analyzers.") for name in LAYERS
    }
    places |= {"hook/": "runtime.hook", "processes/": "runtime.processes"}
    ways = {
        (next(name for start, name in places.items() if path.startswith(start)), way, number)
        for number, *paths in steps
        for way, path in zip(("graph", "plan", "batch"), paths, strict=True)
    }
    assert len(ways) == 24
    assert drawn == ways
    heights = {box.get("id"): float(box.find("{*}rect").get("y")) for box in boxes}  # type: ignore[union-attr, arg-type]
    layers = [name.removeprefix("analyzers.") for name in LAYERS if name != "runtime"]
    assert set(heights) == set(layers)
    assert [heights[name] for name in layers] == sorted(heights.values(), reverse=True)
