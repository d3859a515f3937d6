"""A verdict in the forms that other tools read: JUnit XML, SARIF 2.1.0, GitHub annotations and step summary."""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ElementTree
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from ddltool.analyzers.answers.gating.metrics import LONGEST_NAME, harmless, show
from ddltool.errors import shortened
from ddltool.results import GateCheck, GateResult

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
# What XML 1.0 has no way to write.
_INVALID_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def figures_of(check: GateCheck) -> tuple[str, str, str, str]:
    """Return a check's (baseline, current value, relative change, limit) as texts; "-" where there is none."""
    change = "-"
    if check.change is not None:
        change = f"{100 * check.change:+.1f}%" if abs(check.change) < 1e4 else f"{100 * check.change:+.3g}%"
    limit = "-" if check.limit is None else f"{check.op} {show(check.limit, check.unit)}"
    return show(check.baseline, check.unit), show(check.current, check.unit), change, limit


def named(name: str) -> str:
    """Return the name of a check or metric on one line, cut to ``LONGEST_NAME`` characters."""
    return shortened(harmless(name), LONGEST_NAME)


def outcome(check: GateCheck) -> str:
    """Return a check's outcome: "pass", "noise" (past the limit, but within the noise) or "FAIL"."""
    return "FAIL" if not check.passed else "noise" if check.in_noise else "pass"


def sentence(check: GateCheck) -> str:
    """Return a check in one line: metric, current value, baseline, change, limit and note."""
    baseline, current, change, limit = figures_of(check)
    figures = f"{current} (baseline {baseline}{'' if change == '-' else f', {change}'}; limit {limit})"
    return harmless(f"{named(check.name)}: {figures}{f'; {check.note}' if check.note else ''}")


def remarks(verdict: GateResult) -> list[str]:
    """Return the notes of the checks: one line per distinct note, with the metrics that have the note."""
    metrics_by_note: dict[str, list[str]] = {}
    for check in verdict.checks:
        if check.note:
            metrics_by_note.setdefault(check.note, []).append(named(check.metric))
    return [harmless(f"{', '.join(metrics)}: {text}") for text, metrics in metrics_by_note.items()]


def junit(verdict: GateResult, subject: str, *, seconds: float = 0.0) -> str:
    """Return JUnit XML: one suite, a test case per check, a failure with the check's sentence.

    ``subject``: what was judged; ``seconds``: how long that took.
    """
    counts = {"tests": str(len(verdict.checks)), "failures": str(len(verdict.failed)), "errors": "0"}
    totals = {**counts, "time": f"{seconds:.3f}"}
    root = ElementTree.Element("testsuites", {"name": "ddltool gate", **totals})
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": _xml_text(f"ddltool gate {subject}"), **totals, "skipped": "0"}
    )
    for check in verdict.checks:
        name = {"name": _xml_text(check.name), "classname": _xml_text(f"ddltool.gate.{subject}")}
        message = _xml_text(sentence(check))
        case = ElementTree.SubElement(suite, "testcase", {**name, "time": "0"})
        if not check.passed:
            ElementTree.SubElement(case, "failure", {"message": message, "type": "regression"}).text = message
        elif check.note:
            ElementTree.SubElement(case, "system-out").text = message
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml_text(text: str) -> str:
    """Return text without the characters that XML 1.0 cannot hold, on one line."""
    return _INVALID_XML.sub("�", harmless(text))


def sarif(verdict: GateResult, path: str, *, version: str) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log: a rule per metric, a result per failed check at the artifact's file.

    ``path``: the judged artifact; ``version``: ddltool's.
    """
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
    location = {"physicalLocation": {"artifactLocation": {"uri": _uri_reference(path)}, "region": {"startLine": 1}}}
    results = [
        {
            "ruleId": f"ddltool/{check.metric}",
            "ruleIndex": metrics.index(check.metric),
            "level": "error",
            "message": {"text": sentence(check)},
            "locations": [location],
            # By it GitHub knows a check again in the next run.
            "partialFingerprints": {"ddltoolCheck/v1": hashlib.sha256(check.name.encode()).hexdigest()[:32]},
        }
        for check in verdict.failed
    ]
    driver = {"name": "ddltool gate", "version": version, "rules": rules}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _uri_reference(path: str) -> str:
    """Return a path as a URI reference: a relative path stays relative, an absolute one becomes ``file:///...``."""
    posix = PurePath(path).as_posix()
    quoted = quote(posix, errors="surrogateescape")  # names of files are bytes, not all of them UTF-8
    return f"file://{quoted}" if posix.startswith("/") else quoted


def workflow_commands(verdict: GateResult, path: str) -> list[str]:
    """Return GitHub workflow commands: an error per failed check, a notice per check that passed within the noise."""
    lines = []
    for check in verdict.checks:
        if not check.passed or check.in_noise:
            command, title = ("notice", "inside the noise") if check.passed else ("error", "ddltool gate")
            title = _escape_command(f"{title}: {named(check.metric)}", ":,")
            lines.append(
                f"::{command} file={_escape_command(path, ':,')},line=1,title={title}::{_escape_command(sentence(check))}"
            )
    return lines


def _escape_command(text: str, special: str = "") -> str:
    """Return text that stays within a workflow command: percent-encoded as GitHub decodes it.

    ``special``: further characters to encode, the delimiters of a command's properties.
    """
    text = harmless(text)
    for character in "%\r\n" + special:  # % first, as the codes of the others have one
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def summary(verdict: GateResult, subject: str) -> str:
    """Return the step summary: a Markdown table of all checks, then the notes.

    ``subject``: what was judged.
    """
    count, failed = len(verdict.checks), len(verdict.failed)
    lines = [
        f"### ddltool gate: {f'{failed} of {count} checks failed' if failed else f'passed ({count} checks)'}",
        "",
        _escape_markdown(subject),
        "",
        "| | check | baseline | current | change | limit |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for check in verdict.checks:
        cells = (outcome(check), named(check.name), *figures_of(check))
        lines.append("| " + " | ".join(_escape_markdown(cell) for cell in cells) + " |")
    notes = [*remarks(verdict), *([verdict.noise_test] if verdict.noise_test else [])]
    return "\n".join([*lines, "", *(f"- {_escape_markdown(line)}" for line in notes)]) + "\n"


def _escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is: no HTML, no emphasis, no table cell ends in it."""
    # & first, as the others' replacements have one.
    escaped = harmless(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", escaped)
