"""Wheel and sdist are the same whenever they are built, and a gate runs where torch is absent, as docs/gate.md says."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)


def build(folder: Path, number: str, repository: str = "") -> Path:
    """Build wheel and sdist in a clone, as ``make dist`` does. Returns the wheel."""
    source = folder / f"source{number}"
    assert run("git", "clone", "-q", ROOT, source).returncode == 0
    made = run("env", f"PYTHON={sys.executable}", f"REPOSITORY={repository}", source / ".ci/dist")
    assert made.returncode == 0, made.stderr
    return next((source / "dist").glob("ddltool-*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "1")


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds what the page on gates installs, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    page = (ROOT / "docs/gate.md").read_text(encoding="utf-8")
    lines = re.findall(r"^pip install (.*?)(?:\s+#.*)?$", page, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = [str(wheel) if word.endswith(".whl") else word for word in line.split()]
        installed = run(folder / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *words)
        assert installed.returncode == 0, installed.stderr
    return folder / "bin/python"


def test_wheel_and_sdist_have_the_same_bytes_each_time(wheel: Path, tmp_path: Path) -> None:
    again = build(tmp_path, "2")
    assert again.read_bytes() == wheel.read_bytes()
    first, second = (next(made.parent.glob("ddltool-*.tar.gz")) for made in (wheel, again))
    assert first.read_bytes() == second.read_bytes()


def test_the_bill_of_materials_is_what_an_install_brings(wheel: Path, python: Path) -> None:
    """Every requirement of the wheel, and of those, with versions; in an environment that lacks some it says so."""
    bill = json.loads(next(wheel.parent.glob("*.cdx.json")).read_text())
    declared = [Requirement(line) for line in distribution("ddltool").requires or () if "extra ==" not in line]
    links = {entry["ref"].partition("@")[0]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert {name.partition("@")[0] for name in links["pkg:pypi/ddltool"]} == {
        f"pkg:pypi/{one.name}" for one in declared
    }
    listed = {entry["purl"]: entry for entry in bill["components"]}
    assert {name for needed in links.values() for name in needed} == set(listed)
    assert listed[f"pkg:pypi/numpy@{version('numpy')}"]["licenses"]
    assert run(python, ROOT / ".ci/sbom").returncode != 0


def test_for_an_index_every_link_has_an_address(wheel: Path, tmp_path: Path) -> None:
    """That of a file that is there, in the commit; code and words of the page stay as they are."""

    def about(made: Path) -> email.message.Message:
        archive = zipfile.ZipFile(made)
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))

    address, commit = "https://example.org/team/ddltool", run("git", "rev-parse", "HEAD").stdout.strip()
    plain, told = about(wheel), about(build(tmp_path, "3", f"{address}.git"))
    assert plain["Project-URL"] is None
    urls = dict(line.split(", ") for line in told.get_all("Project-URL", []))
    assert urls["Repository"] == address
    page = told.get_payload()
    assert isinstance(page, str)
    links = re.findall(r"\]\(([^)]+)\)", page)
    own = [link for link in [*links, *urls.values()] if f"/{commit}/" in link]
    assert len(own) > 40
    assert all((ROOT / link.partition(f"/{commit}/")[2].partition("#")[0]).is_file() for link in own)
    assert all(link.startswith("https://") for link in links)
    assert f"{address}/raw/{commit}/docs/predict.png" in links
    assert re.sub(rf"{address}/(blob|raw)/{commit}/", "", page) == plain.get_payload()
    refused = run(sys.executable, ".ci/addresses", tmp_path, "example.org", commit)
    assert refused.stderr.startswith("error: REPOSITORY: is 'example.org'; give")


def test_the_wheel_of_the_sdist_holds_the_same_files(wheel: Path, tmp_path: Path) -> None:
    sdist = next(wheel.parent.glob("ddltool-*.tar.gz"))
    made = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, sdist)
    assert made.returncode == 0, made.stderr
    names = [set(zipfile.ZipFile(each).namelist()) for each in (wheel, next(tmp_path.glob("*.whl")))]
    assert names[0] == names[1]


def test_a_gate_needs_no_torch(python: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    graph = ROOT / "fixtures/graphs/vgg16-training.graph.json.gz"
    times = ROOT / "fixtures/barrier/times.csv"
    for code, *arguments in (
        (0, "gate", graph, "--baseline", graph),
        (1, "gate", graph, "--rule", "ops <= 3"),
        (0, "barrier", times, "-o", tmp_path / "barrier.json"),
        (0, "show", "schema", "plan"),
        (0, "simulate", "--help"),
        (0, "report", graph, tmp_path / "barrier.json", "-o", tmp_path / "report.html"),
    ):
        done = run(python, "-m", "ddltool", *arguments, cwd=tmp_path)
        assert done.returncode == code, (arguments, done.stderr)
    refused = run(python, "-m", "ddltool", "trace", "zoo:resnet50_v1", "-o", plan, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: torch: ")
    assert refused.stderr.count("\n") == 1
    assert not plan.exists()
