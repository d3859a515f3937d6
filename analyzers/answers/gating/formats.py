"""A verdict in the formats of other tools: JUnit XML, SARIF 2.1.0, GitHub annotations and step summary."""

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
# Characters that XML 1.0 cannot contain, not even escaped.
_INVALID_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def check_texts(check: GateCheck) -> tuple[str, str, str, str]:
    """Return a check's (baseline, current value, relative change, limit) as texts; "-" for one that it does not have."""
    change = "-"
    if check.change is not None:
        change = f"{100 * check.change:+.1f}%" if abs(check.change) < 1e4 else f"{100 * check.change:+.3g}%"
    limit = "-" if check.limit is None else f"{check.op} {show(check.limit, check.unit)}"
    return show(check.baseline, check.unit), show(check.current, check.unit), change, limit


def short_name(name: str) -> str:
    """Return the name of a check or metric made harmless, on one line, shortened to ``LONGEST_NAME`` characters."""
    return shortened(harmless(name), LONGEST_NAME)


def outcome(check: GateCheck) -> str:
    """Return a check's outcome: "pass", "noise" (past the limit, but within the noise) or "FAIL"."""
    if not check.passed:
        return "FAIL"
    return "noise" if check.in_noise else "pass"


def sentence(check: GateCheck) -> str:
    """Return a check in one line: metric, current value, baseline, change, limit and note."""
    baseline, current, change, limit = check_texts(check)
    change_text = "" if change == "-" else f", {change}"
    note_text = f"; {check.note}" if check.note else ""
    figures = f"{current} (baseline {baseline}{change_text}; limit {limit})"
    return harmless(f"{short_name(check.name)}: {figures}{note_text}")


def remarks(verdict: GateResult) -> list[str]:
    """Return the notes of the checks: one line per distinct note, after the names of the metrics that have it."""
    metrics_by_note: dict[str, list[str]] = {}
    for check in verdict.checks:
        if check.note:
            metrics_by_note.setdefault(check.note, []).append(short_name(check.metric))
    return [harmless(f"{', '.join(metrics)}: {text}") for text, metrics in metrics_by_note.items()]


def junit(verdict: GateResult, subject: str, *, seconds: float = 0.0) -> str:
    """Return JUnit XML: one suite with a test case per check; a failed one has the check's sentence.

    ``subject``: the name of what was judged; ``seconds``: the time that it took.
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
    """Return text made harmless, on one line, with � in place of characters that XML 1.0 cannot contain."""
    return _INVALID_XML.sub("�", harmless(text))


def sarif(verdict: GateResult, path: str, *, version: str) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log: a rule per metric, and a result per failed check, located in the file ``path``.

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
    # Code scanning wants a region, and a check belongs to no line, so every result points at the first one.
    location = {"physicalLocation": {"artifactLocation": {"uri": _uri_reference(path)}, "region": {"startLine": 1}}}
    results = [
        {
            "ruleId": f"ddltool/{check.metric}",
            "ruleIndex": metrics.index(check.metric),
            "level": "error",
            "message": {"text": sentence(check)},
            "locations": [location],
            # By this GitHub recognises a check in the next run.
            "partialFingerprints": {"ddltoolCheck/v1": hashlib.sha256(check.name.encode()).hexdigest()[:32]},
        }
        for check in verdict.failed
    ]
    driver = {"name": "ddltool gate", "version": version, "rules": rules}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _uri_reference(path: str) -> str:
    """Return a path as a URI reference: a relative path stays relative, an absolute one becomes ``file:///...``."""
    posix = PurePath(path).as_posix()
    quoted = quote(posix, errors="surrogateescape")  # a file's name may be bytes that are not UTF-8
    return f"file://{quoted}" if posix.startswith("/") else quoted


def workflow_commands(verdict: GateResult, path: str) -> list[str]:
    """Return GitHub workflow commands: an error per failed check, a notice per check that passed within the noise."""
    lines = []
    for check in verdict.checks:
        if check.passed and not check.in_noise:
            continue
        command = "notice" if check.passed else "error"
        title = "inside the noise" if check.passed else "ddltool gate"
        escaped_title = _escape_command(f"{title}: {short_name(check.metric)}", ":,")
        escaped_path = _escape_command(path, ":,")
        message = _escape_command(sentence(check))
        lines.append(f"::{command} file={escaped_path},line=1,title={escaped_title}::{message}")
    return lines


def _escape_command(text: str, special: str = "") -> str:
    """Return text with the characters percent-encoded that would end a part of a workflow command; GitHub decodes them.

    ``special``: further characters to encode, the delimiters of a command's properties.
    """
    text = harmless(text)
    for character in "%\r\n" + special:  # % first, as the codes of the others contain it
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def summary(verdict: GateResult, subject: str) -> str:
    """Return GitHub's step summary: a Markdown table of all checks, then the notes.

    ``subject``: the name of what was judged.
    """
    count = len(verdict.checks)
    failed = len(verdict.failed)
    lines = [
        f"### ddltool gate: {f'{failed} of {count} checks failed' if failed else f'passed ({count} checks)'}",
        "",
        _escape_markdown(subject),
        "",
        "| | check | baseline | current | change | limit |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for check in verdict.checks:
        cells = (outcome(check), short_name(check.name), *check_texts(check))
        lines.append("| " + " | ".join(_escape_markdown(cell) for cell in cells) + " |")
    notes = [*remarks(verdict), *([verdict.noise_test] if verdict.noise_test else [])]
    return "\n".join([*lines, "", *(f"- {_escape_markdown(line)}" for line in notes)]) + "\n"


def _escape_markdown(text: str) -> str:
    """Return text that Markdown shows literally: it has no HTML and no emphasis, and ends no table cell."""
    # & first, as the replacements of the others contain it.
    escaped = harmless(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", escaped)
