"""A verdict in the forms that other tools read: JUnit XML, SARIF 2.1.0, GitHub annotations and step summary."""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from ddltool.analyzers.gating.metric import LONGEST_NAME, harmless, show
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


def sentence(check: GateCheck) -> str:
    """Return the check's outcome in one line: what it is, its baseline, its limit."""
    baseline, current, change, limit = figures_of(check)
    figures = f"{current} (baseline {baseline}{'' if change == '-' else f', {change}'}; limit {limit})"
    return harmless(f"{named(check)}: {figures}{f'; {check.note}' if check.note else ''}")


def named(check: GateCheck) -> str:
    """Return a check's name for people: on one line, and shortened where it is longer than anybody reads."""
    return shortened(harmless(check.name), LONGEST_NAME)


def junit(verdict: GateResult, subject: str, *, seconds: float = 0.0) -> str:
    """Return JUnit XML: one suite, a test case per check, a failure with the check's sentence."""
    failures = str(len(verdict.failed))
    head = {"tests": str(len(verdict.checks)), "failures": failures, "errors": "0", "time": f"{seconds:.3f}"}
    root = ElementTree.Element("testsuites", {"name": "ddltool gate", **head})
    suite = ElementTree.SubElement(root, "testsuite", {"name": _xml(f"ddltool gate {subject}"), **head, "skipped": "0"})
    for check in verdict.checks:
        case = ElementTree.SubElement(
            suite, "testcase", {"name": _xml(check.name), "classname": _xml(f"ddltool.gate.{subject}"), "time": "0"}
        )
        if not check.passed:
            failure = ElementTree.SubElement(case, "failure", {"message": _xml(sentence(check)), "type": "regression"})
            failure.text = _xml(sentence(check))
        elif check.note:
            ElementTree.SubElement(case, "system-out").text = _xml(sentence(check))
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return _NO_XML.sub("�", harmless(text))


def sarif(verdict: GateResult, path: str, *, version: str) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log: a rule per check, a result per failed check at the artifact's file."""
    identifiers = {check.name: f"ddltool/{check.metric}" for check in verdict.checks}
    rules: dict[str, dict[str, Any]] = {}
    for check in verdict.checks:
        rules.setdefault(
            identifiers[check.name],
            {
                "id": identifiers[check.name],
                "name": re.sub("[^0-9A-Za-z]+", "_", check.metric),
                "shortDescription": {"text": f"{check.metric} keeps its limit"},
                "defaultConfiguration": {"level": "error"},
            },
        )
    positions = {identifier: number for number, identifier in enumerate(rules)}
    return {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "ddltool gate", "version": version, "rules": list(rules.values())}},
                "results": [
                    {
                        "ruleId": identifiers[check.name],
                        "ruleIndex": positions[identifiers[check.name]],
                        "level": "error",
                        "message": {"text": sentence(check)},
                        "locations": [
                            {
                                "physicalLocation": {
                                    "artifactLocation": {"uri": _uri(path)},
                                    "region": {"startLine": 1},
                                }
                            }
                        ],
                        "partialFingerprints": {
                            "ddltoolCheck/v1": hashlib.sha256(check.name.encode()).hexdigest()[:32]
                        },
                    }
                    for check in verdict.failed
                ],
            }
        ],
    }


def _uri(path: str) -> str:
    """Return a path as a URI reference: relative ones stay relative, absolute ones become file:///."""
    posix = PurePath(path).as_posix()
    quoted = quote(posix, errors="surrogateescape")  # names of files are bytes, not all of them UTF-8
    return f"file://{quoted}" if posix.startswith("/") else quoted


def workflow_commands(verdict: GateResult, path: str) -> list[str]:
    """Return GitHub workflow commands: an error per failed check, a notice per change that is noise."""
    lines = []
    for check in verdict.checks:
        if check.passed and not check.in_noise:
            continue
        command, title = ("notice", "inside the noise") if check.passed else ("error", "ddltool gate")
        place = f"file={_property(path)},line=1,title={_property(f'{title}: {shortened(check.metric, LONGEST_NAME)}')}"
        lines.append(f"::{command} {place}::{_data(sentence(check))}")
    return lines


def _data(text: str) -> str:
    """Escape the message of a workflow command; what only a terminal or the runner acts on is shown as an escape."""
    return harmless(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape a property of a workflow command."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


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
        cells = (outcome(check), named(check), *figures_of(check))
        lines.append("| " + " | ".join(_markdown(cell) for cell in cells) + " |")
    notes = [f"- {_markdown(line)}" for line in remarks(verdict)]
    if verdict.noise_test:
        notes.append(f"- {_markdown(verdict.noise_test)}")
    return "\n".join([*lines, "", *notes]) + "\n"


def remarks(verdict: GateResult) -> list[str]:
    """Return the notes of the checks, a line for each text with the metrics that it is about."""
    about: dict[str, list[str]] = {}
    for check in verdict.checks:
        if check.note:
            about.setdefault(check.note, []).append(check.metric)
    return [
        harmless(f"{', '.join(shortened(name, LONGEST_NAME) for name in metrics)}: {text}")
        for text, metrics in about.items()
    ]


def outcome(check: GateCheck) -> str:
    """Return a check's outcome in a word: pass, noise (passed because of it) or FAIL."""
    return "FAIL" if not check.passed else "noise" if check.in_noise else "pass"


def _markdown(text: str) -> str:
    escaped = harmless(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", escaped)
