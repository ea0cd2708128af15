"""Tables of tuned tiles: measured choices, which a backend's plan takes before its heuristic.

A table is a JSON file of one device, `data/tuned/<device>.json` in the package or the file that FLASH3_TUNED names (which comes first;
"off": no table at all). An entry says for which kernel spec and which lengths it was measured, what tiles won, and how fast they were.
What no longer decodes, or does not fit the device's budget, is ignored with a warning: a table never stops a call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import re
import typing
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .kernel_cache import write_whole
from .mask import Mask
from .problem import Problem, Sizes
from .settings import settings

FORMAT = 1
FOLDER = Path(__file__).parent / "data" / "tuned"
OFF = "off"
MOST_STEPS_AWAY = 1.0
"""An entry serves lengths up to twice as long or half as long, queries and reach together."""
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One measured choice: for `spec` (encoded), about q_len queries that each reach over about `reach` keys."""

    backend: str
    spec: dict[str, Any]
    q_len: int
    reach: int
    tiles: dict[str, Any]
    evidence: dict[str, Any] = field(default_factory=dict)

    def distance(self, q_len: int, reach: int) -> float:
        """In powers of two."""
        return sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in ((q_len, self.q_len), (reach, self.reach)))


@dataclass(frozen=True)
class Table:
    """All entries of one device."""

    device: str
    entries: tuple[Entry, ...] = ()

    def nearest(self, backend: str, spec: dict[str, Any], q_len: int, reach: int) -> Entry | None:
        """The entry of this backend and spec that was measured closest to these lengths, if it is close enough."""
        same = [e for e in self.entries if e.backend == backend and e.spec == spec]
        best = min(same, key=lambda e: e.distance(q_len, reach), default=None)
        return best if best is not None and best.distance(q_len, reach) <= MOST_STEPS_AWAY else None

    def with_entry(self, entry: Entry) -> Table:
        """The table with this entry in the place of the one for the same backend, spec and lengths."""

        def place(e: Entry) -> tuple[Any, ...]:
            return e.backend, json.dumps(e.spec, sort_keys=True), e.q_len, e.reach

        kept = [e for e in self.entries if place(e) != place(entry)]
        return Table(self.device, tuple(sorted([*kept, entry], key=place)))


def slug(device: str) -> str:
    """A device's name as a file name: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "cpu"


@functools.cache
def shipped(device: str) -> Path:
    """Where the package keeps the table of a device."""
    return FOLDER / f"{slug(device)}.json"


def read(path: Path) -> Table:
    """A table from its file.

    Raises:
        ValueError: the file is no table of this format; the message names it.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, known: {FORMAT}")
        return Table(data["device"], tuple(_checked(Entry(**entry)) for entry in data["entries"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of tuned tiles ({error})") from None


def _checked(entry: Entry) -> Entry:
    wrong = [name for name in ("q_len", "reach") if type(getattr(entry, name)) is not int]
    wrong += [name for name in ("spec", "tiles", "evidence") if not isinstance(getattr(entry, name), dict)]
    if wrong or not isinstance(entry.backend, str):
        raise ValueError(f"an entry with a wrong {(wrong or ['backend'])[0]}: {entry}")
    return entry


def write(path: Path, table: Table) -> None:
    """Write a table, whole or not at all; makes the folder."""
    entries = [dataclasses.asdict(entry) for entry in table.entries]
    lines = ",\n  ".join(json.dumps(entry, sort_keys=True) for entry in entries)
    text = f'{{"format": {FORMAT}, "device": {json.dumps(table.device)}, "entries": [\n  {lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=0o644)


# ------------------------------------------------------------------------------------------------ dataclasses as JSON


def encode(value: Any) -> Any:
    """A frozen dataclass of numbers, enums and such dataclasses, as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value.value if isinstance(value, enum.Enum) else value


def decode(cls: type[T], data: dict[str, Any]) -> T:
    """What `encode` made, as `cls` again. Fields that are not there take their defaults.

    Raises:
        ValueError, TypeError: the data do not fit the class.
    """
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{cls.__name__} has no {', '.join(unknown)}")
    return cls(**{name: _decode_field(hints[name], value) for name, value in data.items()})


def _decode_field(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return decode(hint, value)
    wanted = (int, float) if hint is float else hint
    if isinstance(hint, type) and (not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool)):
        raise TypeError(f"{value!r} is no {hint.__name__}")
    return value


# ------------------------------------------------------------------------------------------------ what a plan asks


def reach(mask: Mask, sizes: Sizes) -> int:
    """Keys that a query can see at most."""
    bounds = mask.bounds(sizes.q_len, sizes.k_len)
    return max(1, min(sizes.k_len, bounds.left + bounds.right + 1, bounds.chunk))


def find(backend: str, problem: Problem, spec: Any, cls: type[T], faults: Callable[[T], Iterable[str]]) -> tuple[T, str] | None:
    """The tuned tiles of a problem and where they come from, or None.

    Args:
        spec: the backend's own key, a dataclass: entries are for equal ones.
        cls: the class of its tiles.
        faults: why tiles cannot run here; an entry with faults is ignored, with a warning.
    """
    if settings.tuned == OFF:
        return None
    device = problem.device.name or problem.device.type
    tables = [(path, _table(path)) for path in (settings.tuned, str(shipped(device))) if path is not None]
    for path, table in tables:
        if table is None or table.device != device:
            continue
        entry = table.nearest(backend, encode(spec), problem.sizes.q_len, reach(problem.mask, problem.sizes))
        tiles = None if entry is None else _usable(entry, cls, faults, path)
        if tiles is not None:
            return tiles, path
    return None


def _usable(entry: Entry, cls: type[T], faults: Callable[[T], Iterable[str]], path: str) -> T | None:
    try:
        tiles = decode(cls, entry.tiles)
        wrong = list(faults(tiles))
    except (ValueError, TypeError) as error:
        wrong = [str(error)]
    if wrong:
        _warn(f"flash3 ignores tuned tiles {entry.tiles} of {path}: {'; '.join(wrong)}")
        return None
    return tiles


@functools.cache
def _warn(message: str) -> None:
    """Once each."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@functools.cache
def _table(path: str) -> Table | None:
    """Read once in a process."""
    if not os.path.exists(path):
        if path == settings.tuned:
            _warn(f"flash3 finds no table of tuned tiles at {path} (FLASH3_TUNED)")
        return None
    try:
        return read(Path(path))
    except (ValueError, OSError) as error:
        _warn(f"flash3 goes on without a table of tuned tiles: {error}")
        return None


def forget() -> None:
    """Read the tables again when next asked."""
    _table.cache_clear()
    _warn.cache_clear()
