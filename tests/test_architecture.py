"""The house keeps its shape: arrows point downwards, imports are light, everything is packaged and documented."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"commands": "commands", "runtime": "runtime", "analyzers": "analyzers", "fixtures": "fixtures", "toolkit": ""}
# Who may import whom; toolkit is the package itself and imports nothing of ours.
ALLOWED = {
    "commands": {"commands", "runtime", "analyzers", "fixtures", "toolkit"},
    "runtime": {"runtime", "analyzers", "toolkit"},
    "analyzers": {"analyzers", "toolkit"},
    "fixtures": {"fixtures", "toolkit"},
    "toolkit": {"toolkit"},
}
# What a user names may be shipped: those who load it, and they alone, look there.
SHIPPED = "analyzers/loading/"
# The doors belong to the package: `python -m ddltool` hands over to the command line, `import ddltool` to the functions.
EXEMPT = {"toolkit/__main__.py", "toolkit/__init__.py"}


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "ddltool":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS and parts[1] != "toolkit" else "toolkit"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    relative = path.relative_to(ROOT)
    if str(relative) in EXEMPT:
        return
    rooms = {room for module in imported_modules(path) if (room := room_of(module)) is not None}
    if str(relative).startswith(SHIPPED):
        rooms -= {"fixtures"}
    assert rooms <= ALLOWED[relative.parts[0]], f"{relative} imports {rooms - ALLOWED[relative.parts[0]]}"


def test_the_import_rule_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from ddltool.commands.main import run\nimport ddltool.analyzers.goodput\n")
    assert {room_of(module) for module in imported_modules(bad)} == {"commands", "analyzers"}


def test_no_import_circles() -> None:
    import networkx

    graph: networkx.DiGraph[str] = networkx.DiGraph()
    names = {module_name(path): path for path in sources()}
    for name, path in names.items():
        for node in tree_of(path).body:  # imports inside functions keep a command light; they cannot form a load circle
            if isinstance(node, ast.ImportFrom) and node.module in names:
                for alias in node.names:
                    member = f"{node.module}.{alias.name}"
                    graph.add_edge(name, member if member in names else node.module)
    assert list(networkx.simple_cycles(graph)) == []


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = (["ddltool"] if parts[0] == "toolkit" else ["ddltool", parts[0]]) + parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_examples_and_benchmarks_use_what_is_there() -> None:
    """Most run seldom; nothing else tells that a module lost what they call."""
    modules = {module_name(path) for path in sources()}
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
            assert hasattr(importlib.import_module(module), name), f"{path.name} uses {module}.{name}"


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
    "torch",
    "pandas",
    "ortools",
    "networkx",
    "onnx",
    "scipy",
    "altair",
    "vl_convert",
    "sklearn",
    "numpy",
    "pydantic",
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
        command, file = load(name), ROOT / "docs" / f"{name.partition(' ')[0]}.md"
        assert command.help, name
        assert file.is_file(), f"{file} is missing"
        assert f"ddltool {name}" in file.read_text(encoding="utf-8"), f"{file} does not show ddltool {name}"
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"ddltool {name}: {parameter.opts} has no help"


def test_public_functions_have_docstrings() -> None:
    for path in sources():
        for node in tree_of(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.relative_to(ROOT)}: {node.name}"


def test_the_page_of_the_house_names_what_is_there() -> None:
    """Where to start reading, and the stays of the ways through the rooms: at most eight each."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = re.findall(r"^\| `([a-z]+)/` \|.*\| ([^|]+) \|$", page, flags=re.MULTILINE)
    ways = re.findall(r"`([a-z_/]+\.py)`(?:: `(\w+)`)?", page)
    assert len(re.findall(r"^\| \d \|", page, flags=re.MULTILINE)) <= 8
    starts = [
        (f"{room}/{file}", name) for room, cell in rooms for file, name in re.findall(r"`(\w+)(?:\.(\w+))?`", cell)
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
    """Every package has its place, and the numbers in it are the steps of the ways that stay there."""
    boxes = ElementTree.parse(ROOT / "docs" / "rooms.svg").getroot().findall("{*}g")
    drawn = {(box.get("id"), text.get("class"), text.text) for box in boxes for text in box.findall("{*}text[@class]")}
    page = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^\| (\d) \| `(\w+)/.*?`([a-z_]+)/.*?`([a-z_]+)/", page, flags=re.MULTILINE)
    ways = {(room, way, row[0]) for row in steps for way, room in zip(("graph", "plan", "batch"), row[1:], strict=True)}
    assert drawn == ways
    packages = {
        f"{'runtime.' if top == 'runtime' and path.name != 'hook' else ''}{path.name}"
        for top in ("analyzers", "runtime")
        for path in (ROOT / top).iterdir()
        if (path / "__init__.py").exists()
    }
    assert {box.get("id") for box in boxes} == {*packages, "toolkit"}
