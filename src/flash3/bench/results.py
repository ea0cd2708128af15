"""Rows and the report: what was measured, as data. JSON and CSV come from here; tables and pictures only show it."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..kernel_cache import write_whole
from .protocol import median, ratio, spread
from .providers import is_ours
from .roofline import TERA, Rates

FORMAT = 1
OURS = "flash3"
DIGITS = 5


@dataclass
class Row:
    """One provider on one workload and task.

    times_ms: one number per round; solo_ms: one per order of a solo run. error: why there are no times. max_error against float64, with
    what was allowed; faults: what is wrong with the result. memory_mb: peak of the device's memory during a call, beyond what was there;
    None where torch does not allocate it.
    """

    workload: str
    task: str
    provider: str
    error: str = ""
    note: str = ""
    timing: str = ""
    times_ms: list[float] = field(default_factory=list)
    solo_ms: list[float] = field(default_factory=list)
    solo_watts: float | None = None
    max_error: float | None = None
    max_allowed: float | None = None
    faults: list[str] = field(default_factory=list)
    memory_mb: float | None = None

    @property
    def ms(self) -> float | None:
        """The median of the rounds; of a solo run, the mean."""
        if self.times_ms:
            return median(self.times_ms)
        return sum(self.solo_ms) / len(self.solo_ms) if self.solo_ms else None

    @property
    def spread_ms(self) -> float:
        return spread(self.times_ms)

    @property
    def ours(self) -> bool:
        return is_ours(self.provider)


@dataclass(frozen=True)
class Subject:
    """What the rows of one workload and task have in common. floor_ms and unit: the roofline's, by the rates of the same run."""

    workload: str
    task: str
    shape: str
    flops: float
    bytes: float
    floor_ms: float
    unit: str


@dataclass
class Report:
    """A whole run. `interrupted`: it was stopped early, and holds what there was."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rates: dict[str, dict[str, Any]] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    subjects: list[Subject] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    def of(self, subject: Subject) -> list[Row]:
        """The rows of one workload and task."""
        return [row for row in self.rows if (row.workload, row.task) == (subject.workload, subject.task)]

    def providers(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(row.provider for row in self.rows))

    def wrong(self) -> list[Row]:
        """Rows of ours that failed, or whose result is not right. What ours says it does not support is neither."""
        return [row for row in self.rows if row.ours and (row.faults or row.error.startswith("failed"))]


def tflops(subject: Subject, ms: float | None) -> float | None:
    return None if ms is None else subject.flops / (ms / 1e3) / TERA


def terabytes(subject: Subject, ms: float | None) -> float | None:
    return None if ms is None else subject.bytes / (ms / 1e3) / TERA


def fraction(subject: Subject, ms: float | None) -> float | None:
    """Of the roofline."""
    return None if ms is None else subject.floor_ms / ms


@dataclass(frozen=True)
class Comparison:
    """Ours beside the fastest other provider of the same subject: how many times as fast, by rounds and, where run, solo."""

    peer: str
    ratio: float | None
    solo_peer: str
    solo_ratio: float | None


def compare(report: Report, subject: Subject, ours: str = OURS) -> Comparison | None:
    """None where ours or every other has no times."""
    rows = report.of(subject)
    mine = next((row for row in rows if row.provider == ours and row.ms), None)
    if mine is None:
        return None
    peers = [row for row in rows if not row.ours and row.times_ms and len(row.times_ms) == len(mine.times_ms)]
    alone = [row for row in rows if not row.ours and row.solo_ms]
    best = min(peers, key=lambda row: median(row.times_ms), default=None)
    steady = min(alone, key=lambda row: sum(row.solo_ms), default=None) if mine.solo_ms else None
    if best is None and steady is None:
        return None
    return Comparison(
        peer=best.provider if best else "",
        ratio=ratio(best.times_ms, mine.times_ms) if best else None,
        solo_peer=steady.provider if steady else "",
        solo_ratio=sum(steady.solo_ms) / sum(mine.solo_ms) if steady else None,
    )


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Summary:
    """Ratios of ours to one peer, or to the best of each subject, over all subjects where both ran."""

    peer: str
    count: int
    mean: float
    least: float
    where_least: str


def summaries(report: Report, ours: str = OURS) -> Iterator[Summary]:
    """Against the best peer of each subject first, then against each."""
    against: dict[str, list[tuple[float, str]]] = {"best peer": []}
    for subject in report.subjects:
        rows = report.of(subject)
        mine = next((row for row in rows if row.provider == ours and row.times_ms), None)
        for row in rows:
            if mine is not None and not row.ours and len(row.times_ms) == len(mine.times_ms):
                against.setdefault(row.provider, []).append((ratio(row.times_ms, mine.times_ms), _title(subject)))
        found = compare(report, subject, ours)
        if found is not None and found.ratio is not None:
            against["best peer"].append((found.ratio, _title(subject)))
    for peer, ratios in against.items():
        if ratios:
            least, where = min(ratios)
            yield Summary(peer, len(ratios), geometric_mean([value for value, _ in ratios]), least, where)


def _title(subject: Subject) -> str:
    return f"{subject.workload} {subject.task}"


# ------------------------------------------------------------------------------------------------ as files


def rounded(value: Any) -> Any:
    """Floats with five significant digits: nothing here is known better."""
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [rounded(item) for item in value]
    return value


def figures(report: Report) -> list[dict[str, Any]]:
    """One flat dictionary per row, with what follows from its times: for CSV and for programs."""
    table = []
    for subject in report.subjects:
        for row in report.of(subject):
            values = asdict(row) | {"ms": row.ms, "spread_ms": row.spread_ms}
            values |= {name: of(subject, row.ms) for name, of in (("tflops", tflops), ("tb_per_s", terabytes), ("roofline", fraction))}
            table.append(values)
    return table


def as_data(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
    subjects = [asdict(s) | {"best_peer": asdict(c) if (c := compare(report, s)) else None} for s in report.subjects]
    rows = [{k: v for k, v in values.items() if v not in (None, "", [])} for values in figures(report)]
    rest = {name: getattr(report, name) for name in ("machine", "settings", "rates", "before", "after", "seconds", "interrupted")}
    summary = [asdict(s) for s in summaries(report)]
    data: dict[str, Any] = rounded({"format": FORMAT, **rest, "summary": summary, "subjects": subjects, "rows": rows})
    return data


def to_json(report: Report) -> str:
    """One row a line."""
    data = as_data(report)
    heads = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items() if name not in ("subjects", "rows")]
    lists = [f" {json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, data[name])) + "\n ]" for name in ("subjects", "rows")]
    return "{\n" + ",\n".join(heads + lists) + "\n}\n"


def from_json(text: str) -> Report:
    """A report from its JSON.

    Raises:
        ValueError: it is none of this format.
    """
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"no report of format {FORMAT}")
    names = ("machine", "settings", "rates", "before", "after", "seconds", "interrupted")
    subjects = [Subject(**{k: v for k, v in s.items() if k != "best_peer"}) for s in data["subjects"]]
    fields = Row.__dataclass_fields__
    rows = [Row(**{k: v for k, v in row.items() if k in fields}) for row in data["rows"]]
    return Report(**{name: data[name] for name in names}, subjects=subjects, rows=rows)


COLUMNS = (
    "workload", "task", "provider", "ms", "spread_ms", "tflops", "tb_per_s", "roofline", "max_error", "max_allowed", "memory_mb", "timing",
    "note", "error",
)  # fmt: skip


def to_csv(report: Report) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rounded(figures(report)))
    return out.getvalue()


def save(path: Path, text: str) -> None:
    """Write a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=0o644)


def rates_data(rates: Rates) -> dict[str, Any]:
    return {"matmul_tflops": rates.matmul / TERA, "bandwidth_tb_per_s": rates.bandwidth / TERA, "source": rates.source}
