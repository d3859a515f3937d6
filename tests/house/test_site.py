"""The site builds with every link leading somewhere, and has what is made from code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocstrings")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = build(ROOT / "mkdocs.yml", folder)
    assert made.returncode == 0, made.stderr
    return folder


def build(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(config), "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def test_pages_from_code_are_in_it(site: Path) -> None:
    from ddltool.commands.main import COMMANDS, load

    commands, python = ((site / name).read_text("utf-8") for name in ("commands.html", "api.html"))
    assert all(f'href="{name.partition(" ")[0]}.html"' in commands for name in COMMANDS)
    options = {option for name in COMMANDS for each in load(name).params for option in each.opts if option[:2] == "--"}
    assert {option for option in options if option not in commands} <= {"--help", "--quiet", "--verbose"}
    assert "Trace one step, order its transfers" in python
    assert 'href="tutorial.html"' in (site / "index.html").read_text("utf-8")
    assert (site / "examples/first-look.ipynb").is_file()
    terms, formats = ((site / name).read_text("utf-8") for name in ("glossary.html", "formats.html"))
    assert "gradient noise scale (phi)" in terms
    assert all(f'id="{kind}"' in formats for kind in ("stragglers", "plan", "goodput"))
    assert "<code>ests_per_device</code>" in formats
    assert "the step over the ideal step" in formats


def test_it_asks_for_no_network(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text("utf-8")
        assert "fonts.googleapis" not in text
        assert "unpkg.com" not in text


def test_a_link_that_leads_nowhere_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[gone](gone.md)\n")
    settings = (ROOT / "mkdocs.yml").read_text("utf-8").splitlines()
    rules = [line for line in settings if line.startswith(("strict", "validation"))]
    (tmp_path / "mkdocs.yml").write_text("\n".join(["site_name: x", *rules]))
    made = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert made.returncode != 0
    assert "gone.md" in made.stderr
