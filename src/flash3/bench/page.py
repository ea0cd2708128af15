"""The report as one HTML file that opens from disk: pictures and data are inside, nothing is fetched."""

from __future__ import annotations

import html
from collections.abc import Iterator
from string import Template
from typing import Any

from .machine import State
from .pictures import draw, render
from .results import Report, Row, Subject, compare, fraction, summaries, terabytes, tflops, to_json
from .tables import BEHIND, number, reasons, scientific, share

PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { --ink: #1b1b1b; --dim: #666; --line: #ddd; --paper: #fff; --mark: #fdf0ef; }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
p, dl { color: var(--dim); margin: .3rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 }
table.wide { width: 100%; font-size: 13px }
th, td { padding: .2rem .55rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child, th.text, td.text { text-align: left }
.wide th { cursor: pointer; position: sticky; top: 0; background: var(--paper) } th { color: var(--dim); font-weight: 600 }
tr.ours { font-weight: 600; background: var(--mark) } tr.none { color: var(--dim) }
.bad { color: #b00020 } .good { color: #2a7d2e }
svg { width: 100%; height: auto }
input { font: inherit; padding: .25rem .5rem; width: 22rem; border: 1px solid var(--line); border-radius: 4px }
dt { float: left; clear: left; width: 12rem } dd { margin-left: 12.5rem }
details { margin: 1rem 0 } summary { cursor: pointer } pre { overflow-x: auto; font-size: 12px }
</style>
<h1>$title</h1>
<p>$about</p>
<h2>How many times as fast flash3 is</h2>
$summary
<h2>Speed</h2>
$picture
<h2>Every number</h2>
<p><input id="filter" placeholder="filter: d128 causal forward, fa3, window …" aria-label="filter"> Click a column's head to sort by it.</p>
$rows
<h2>What did not run, and notes</h2>
<ul>$reasons</ul>
<h2>How it was measured</h2>
<dl>$facts</dl>
<details><summary>The data, as JSON</summary><pre id="data">$data</pre></details>
<script>
const table = document.getElementById("rows"), body = table.tBodies[0];
document.getElementById("filter").addEventListener("input", e => {
  const words = e.target.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of body.rows) row.hidden = !words.every(w => row.textContent.toLowerCase().includes(w));
});
for (const head of table.tHead.rows[0].cells) head.addEventListener("click", () => {
  const i = head.cellIndex, up = head.dataset.up = head.dataset.up === "1" ? "0" : "1";
  const value = row => { const t = row.cells[i].textContent, n = parseFloat(t); return isNaN(n) ? t : n; };
  const order = (x, y) => typeof x === typeof y ? (x > y) - (x < y) : typeof x === "number" ? -1 : 1;
  [...body.rows].sort((a, b) => order(value(a), value(b)) * (up === "1" ? 1 : -1)).forEach(row => body.append(row));
});
</script>
</html>
""")
HEADS = (
    "workload",
    "task",
    "provider",
    "ms",
    "±",
    "TFLOP/s",
    "TB/s",
    "roofline",
    "of the best peer",
    "solo TFLOP/s",
    "error",
    "allowed",
    "MB",
    "timing",
)
TEXTS = 3
"""Of these are words, not numbers."""


def page(report: Report) -> str:
    """The whole document."""
    device = str(report.machine.get("device", ""))
    packages = ", ".join(f"{name} {version}" for name, version in report.machine.get("packages", {}).items())
    stopped = " Interrupted: it holds what was measured until then." if report.interrupted else ""
    return PAGE.substitute(
        title=html.escape(f"flash3 on {device}"),
        about=html.escape(f"flash3 {report.machine.get('flash3')}, Python {report.machine.get('python')}, {packages}.{stopped}"),
        summary=_summary(report),
        picture=_inline_svg(report),
        rows=_rows(report),
        reasons="".join(f"<li>{html.escape(line)}</li>" for line in reasons(report)) or "<li>Everything ran.</li>",
        facts="".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in _facts(report)),
        data=html.escape(to_json(report), quote=False),
    )


def _inline_svg(report: Report) -> str:
    text = render(draw(report), "svg").decode()
    return text[text.index("<svg") :]


def _summary(report: Report) -> str:
    lines = [
        f"<tr><td>{html.escape(s.peer)}</td><td>{s.count}</td><td>{s.mean:.3f}</td>"
        f'<td class="{"bad" if s.least < BEHIND else "good"}">{s.least:.3f}</td><td class="text">{html.escape(s.where_least)}</td></tr>'
        for s in summaries(report)
    ]
    if not lines:
        return "<p>No other provider ran beside it.</p>"
    heads = "".join(f"<th>{head}</th>" for head in ("beside", "workloads", "geometric mean", "least")) + "<th class=text>at</th>"
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _rows(report: Report) -> str:
    heads = "".join(f"<th{' class=text' if i < TEXTS else ''}>{html.escape(head)}</th>" for i, head in enumerate(HEADS))
    lines = [line for subject in report.subjects for line in _subject_rows(report, subject)]
    return f'<table id="rows" class="wide"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _subject_rows(report: Report, subject: Subject) -> Iterator[str]:
    found = compare(report, subject)
    for row in report.of(subject):
        beside = f"{found.ratio:.3f}" if found is not None and found.ratio is not None and row.provider == "flash3" else ""
        kind = "ours" if row.ours and row.ms else "" if row.ms else "none"
        yield f'<tr class="{kind}" title="{html.escape(subject.shape)}">{"".join(_cells(subject, row, beside))}</tr>'


def _cells(subject: Subject, row: Row, beside: str) -> Iterator[str]:
    alone = sum(row.solo_ms) / len(row.solo_ms) if row.solo_ms else None
    ms = row.ms if row.ms else None
    values = [
        number(ms, 4) if ms else row.error.partition(":")[0],
        number(row.spread_ms, 2) if row.times_ms else "",
        *(number(value) for value in (tflops(subject, ms), terabytes(subject, ms))),
        share(fraction(subject, ms)),
        beside,
        number(tflops(subject, alone)) if alone else "",
        scientific(row.max_error),
        scientific(row.max_allowed),
        number(row.memory_mb, 4),
        row.timing,
    ]
    for text in (subject.workload, subject.task, row.provider):
        yield f'<td class="text">{html.escape(text)}</td>'
    for i, text in enumerate(values):
        wrong = (i == 7 and row.faults) or (i == 5 and beside and float(beside) < BEHIND)
        yield f"<td{' class=bad' if wrong else ''}>{html.escape(text)}</td>"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    hidden = {"packages", "flash3", "python"}
    yield from ((name, str(value)) for name, value in report.machine.items() if name not in hidden)
    yield "before", str(State(**report.before)) if report.before else "not known"
    yield "after", str(State(**report.after)) if report.after else "not known"
    for dtype, rates in report.rates.items():
        yield (
            f"rates, {dtype}",
            f"matmul {rates['matmul_tflops']:.3g} TFLOP/s, copy {rates['bandwidth_tb_per_s']:.3g} TB/s ({rates['source']})",
        )
    yield from ((name, _short(value)) for name, value in report.settings.items())
    yield "took", f"{report.seconds:.0f} s"


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) < 400 else text[:400] + " …"
