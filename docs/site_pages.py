"""What ``make docs`` adds to the pages: home from README.md, the commands' help, the Python functions, documents, terms."""

from __future__ import annotations

import html
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

import ddltool
from ddltool.commands.main import COMMANDS, load
from ddltool.commands.show import FILES, GLOSSARY, RESULTS, schema_of

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {
    "index.md": "README.md",
    **{f"{name.lower()}.md": f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")},
}


_COMMANDS = """# Commands

What `ddltool COMMAND --help` prints. Each name leads to the command's page. Every command also takes `-q` (no progress and
no remarks on stderr) and `-v` (the seconds of each stage; a traceback for an internal error), before or after its name.

## Completion

`ddltool --install-completion` adds a line to the start-up file of your shell (bash, zsh or fish). From the next shell on, Tab
completes commands, options and what they take: device types, precisions, policies, targets, kinds, glossary terms.
`ddltool --show-completion` prints the function, for a start-up file that you write yourself.
"""
MADE = {*BESIDE, "commands.md"}
WORDS: dict[str, Any] = tomllib.loads((ROOT / "docs" / "words.toml").read_text("utf-8"))


def on_config(config: Any) -> Any:
    """Put pages that the navigation does not name under More, and leave out those that there are no more."""
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} | MADE
    config.nav = _present(config.nav, pages)
    if pages:
        config.nav.append({"More": sorted(pages)})
    return config


def _present(nav: list[Any], left: set[str]) -> list[Any]:
    """The entries whose pages there are, which ``left`` then no more names."""
    found: list[Any] = []
    for entry in nav:
        title, page = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(page, list):
            found.append({title: _present(page, left)})
        elif page in left:
            left.remove(page)
            found.append(entry)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and the examples that pages link to."""
    made = {page: _from_root((ROOT / source).read_text("utf-8")) for page, source in BESIDE.items()}
    made |= {"commands.md": commands()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files.append(
                File.generated(config, f"examples/{path.relative_to(ROOT / 'examples')}", abs_src_path=str(path))
            )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ at what the site has of it (a folder has no page), and add what code knows."""
    _findable(page)
    if add := {"glossary.md": terms, "formats.md": documents, "api.md": functions}.get(page.file.src_uri):
        markdown += "\n" + add()
    markdown = re.sub(r"\[([^]]*)\]\((?:\.\./)+examples/ci\)", r"`\1`", markdown)
    for name, source in BESIDE.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown.replace("](../examples/", "](examples/")


def _findable(page: Any) -> None:
    """Let the search find a page by the words that people have for it, and show last what repeats others."""
    name = page.file.src_uri.removesuffix(".md")
    page.meta["tags"] = WORDS["pages"].get(name, [])
    if name in WORDS["last"]:
        page.meta["search"] = {"boost": 0.1}


def on_page_content(text: str, **_: Any) -> str:
    """Keep the name of an option on one line."""
    return re.sub(r"<code>(--[\w-]{1,24})</code>", r'<code class="option">\1</code>', text)


def _from_root(text: str) -> str:
    """A page of the root as one of docs/: its links, seen from there."""
    text = re.sub(r"\]\((?:https?://[^)\s]*/blob/[^/)]*/)?docs/", "](", text)
    for page, source in BESIDE.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text


def commands() -> str:
    """Every command with its options, as ``--help`` has them, by the question that it answers."""
    lines = [_COMMANDS]
    for question in dict.fromkeys(each["question"] for each in COMMANDS.values()):
        lines += [f"## {question}", ""]
        for name in (name for name, each in COMMANDS.items() if each["question"] == question):
            lines += _command(name)
    return "\n".join(lines)


def _command(name: str) -> list[str]:
    command = load(name)
    context = click.Context(command, info_name=f"ddltool {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f"### [{name}]({name.partition(' ')[0]}.md)",
        "",
        COMMANDS[name]["summary"],
        "",
        f"    ddltool {name} {usage}",
        "",
    ]
    rows: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and parameter.name not in ("help", "quiet", "verbose"):
            title = getattr(parameter, "rich_help_panel", None) or "Options"
            flag, text = (_escaped(cell) for cell in record)
            rows.setdefault(str(title), []).append(f"| <code>{flag}</code> | {text} |")
    for title, found in rows.items():
        lines += [f"| {title} | |", "|---|---|", *found, ""]
    return lines


def _escaped(text: str) -> str:
    """Text as a cell that Markdown leaves alone."""
    return re.sub(r"[|*_`\[\]]", lambda sign: f"&#{ord(sign[0])};", html.escape(text.replace("\n", " ")))


def terms() -> str:
    """The glossary as a table."""
    rows = (f"| {term} | {text} |" for term, text in GLOSSARY.items())
    return "\n".join(["| term | what it means |", "|---|---|", *rows])


def documents() -> str:
    """Every kind of document with its fields: what the code says of them."""
    lines = [
        "## Every kind",
        "",
        "Fields as `ddltool show schema KIND` has them, with those of what they hold in parentheses.",
        "",
    ]
    for kind in (*FILES, *RESULTS):
        by = f"`ddltool.{kind.name}`: {kind.form}. Written by {kind.written_by}; read by {kind.read_by}."
        lines += [f"### {kind.name}", "", by, "", *_fields(schema_of(kind.name)), ""]
    return "\n".join(lines)


def _fields(schema: dict[str, Any]) -> list[str]:
    rows = []
    for name, field in schema.get("properties", {}).items():
        held = re.search(r'"#/\$defs/(\w+)"', json.dumps(field))
        part = schema["$defs"][held[1]] if held else {}
        said = field.get("description") or part.get("description", "").partition("\n")[0].removesuffix(".")
        inner = ", ".join(f"`{each}`" for each in part.get("properties", {}))
        if name not in ("kind", "schema_version"):
            rows.append(f"- `{name}` {said.replace('``', '`')}{inner and f' ({inner})'}".rstrip())
    return rows


def functions() -> str:
    """The functions of ``import ddltool as dt``, from their docstrings."""
    lines = ["## Every function", ""]
    homes = ddltool._HOMES
    return "\n".join([*lines, *(f"::: ddltool.{home}.{name}\n" for name, home in homes.items())])
