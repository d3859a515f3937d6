"""A verdict in the forms that other tools read: JUnit XML, SARIF 2.1.0, GitHub annotations and step summary."""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from ddltool.analyzers.gating.metrics import LONGEST_NAME, harmless, show
from ddltool.errors import shortened
from ddltool.results import GateCheck, GateResult

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# What XML 1.0 has no way to write.
_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def figures_of(check: GateCheck) -> tuple[str, str, str, str]:
    """Return a check's baseline, current, change and limit for people."""
    change = "-"
    if check.change is not None:
        change = f"{100 * check.change:+.1f}%" if abs(check.change) < 1e4 else f"{100 * check.change:+.3g}%"
    limit = "-" if check.limit is None else f"{check.op} {show(check.limit, check.unit)}"
    return show(check.baseline, check.unit), show(check.current, check.unit), change, limit


def named(name: str) -> str:
    """Return the name of a check or metric for people: on one line, and shortened where it is longer than anybody reads."""
    return shortened(harmless(name), LONGEST_NAME)


def outcome(check: GateCheck) -> str:
    """Return a check's outcome in a word: pass, noise (passed because of it) or FAIL."""
    return "FAIL" if not check.passed else "noise" if check.in_noise else "pass"


def sentence(check: GateCheck) -> str:
    """Return the check's outcome in one line: what it is, its baseline, its limit."""
    baseline, current, change, limit = figures_of(check)
    figures = f"{current} (baseline {baseline}{'' if change == '-' else f', {change}'}; limit {limit})"
    return harmless(f"{named(check.name)}: {figures}{f'; {check.note}' if check.note else ''}")


def remarks(verdict: GateResult) -> list[str]:
    """Return the notes of the checks, a line for each text with the metrics that it is about."""
    about: dict[str, list[str]] = {}
    for check in verdict.checks:
        if check.note:
            about.setdefault(check.note, []).append(named(check.metric))
    return [harmless(f"{', '.join(metrics)}: {text}") for text, metrics in about.items()]


def junit(verdict: GateResult, subject: str, *, seconds: float = 0.0) -> str:
    """Return JUnit XML: one suite, a test case per check, a failure with the check's sentence."""
    counts = {"tests": str(len(verdict.checks)), "failures": str(len(verdict.failed)), "errors": "0"}
    head = {**counts, "time": f"{seconds:.3f}"}
    root = ElementTree.Element("testsuites", {"name": "ddltool gate", **head})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(f"ddltool gate {subject}"), **head, "skipped": "0"})
    for check in verdict.checks:
        name, told = {"name": _xml(check.name), "classname": _xml(f"ddltool.gate.{subject}")}, _xml(sentence(check))
        case = ElementTree.SubElement(suite, "testcase", {**name, "time": "0"})
        if not check.passed:
            ElementTree.SubElement(case, "failure", {"message": told, "type": "regression"}).text = told
        elif check.note:
            ElementTree.SubElement(case, "system-out").text = told
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return _NO_XML.sub("�", harmless(text))


def sarif(verdict: GateResult, path: str, *, version: str) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log: a rule per metric, a result per failed check at the artifact's file."""
    metrics = list(dict.fromkeys(check.metric for check in verdict.checks))
    rules = [
        {
            "id": f"ddltool/{metric}",
            "name": re.sub("[^0-9A-Za-z]+", "_", metric),
            "shortDescription": {"text": f"{metric} keeps its limit"},
            "defaultConfiguration": {"level": "error"},
        }
        for metric in metrics
    ]
    place = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}, "region": {"startLine": 1}}}
    results = [
        {
            "ruleId": f"ddltool/{check.metric}",
            "ruleIndex": metrics.index(check.metric),
            "level": "error",
            "message": {"text": sentence(check)},
            "locations": [place],
            "partialFingerprints": {"ddltoolCheck/v1": hashlib.sha256(check.name.encode()).hexdigest()[:32]},
        }
        for check in verdict.failed
    ]
    driver = {"name": "ddltool gate", "version": version, "rules": rules}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _uri(path: str) -> str:
    """Return a path as a URI reference: relative ones stay relative, absolute ones become file:///."""
    posix = PurePath(path).as_posix()
    quoted = quote(posix, errors="surrogateescape")  # names of files are bytes, not all of them UTF-8
    return f"file://{quoted}" if posix.startswith("/") else quoted


def workflow_commands(verdict: GateResult, path: str) -> list[str]:
    """Return GitHub workflow commands: an error per failed check, a notice per change that is noise."""
    lines = []
    for check in verdict.checks:
        if not check.passed or check.in_noise:
            command, title = ("notice", "inside the noise") if check.passed else ("error", "ddltool gate")
            title = _escaped(f"{title}: {named(check.metric)}", ":,")
            lines.append(f"::{command} file={_escaped(path, ':,')},line=1,title={title}::{_escaped(sentence(check))}")
    return lines


def _escaped(text: str, more: str = "") -> str:
    """Return a message, or a property with ``more``, of a workflow command: what ends it or acts on a terminal as an escape."""
    text = harmless(text)
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def summary(verdict: GateResult, subject: str) -> str:
    """Return the step summary: a Markdown table of all checks, then the notes."""
    count, failed = len(verdict.checks), len(verdict.failed)
    lines = [
        f"### ddltool gate: {f'{failed} of {count} checks failed' if failed else f'passed ({count} checks)'}",
        "",
        _markdown(subject),
        "",
        "| | check | baseline | current | change | limit |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for check in verdict.checks:
        cells = (outcome(check), named(check.name), *figures_of(check))
        lines.append("| " + " | ".join(_markdown(cell) for cell in cells) + " |")
    notes = [*remarks(verdict), *([verdict.noise_test] if verdict.noise_test else [])]
    return "\n".join([*lines, "", *(f"- {_markdown(line)}" for line in notes)]) + "\n"


def _markdown(text: str) -> str:
    escaped = harmless(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", escaped)
