"""What a tuning run has found so far: one JSON line per fact, flushed to disk before the run goes on.

A killed run starts again with the facts that it had. A last line cut short by the kill is no fact. Facts of other sources, another device
or another version are not taken over: they carry the fingerprint of their run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Fact = dict[str, Any]


class Journal:
    """Facts by (workload, kind, …): `known` finds one, `add` writes one.

    Args:
        path: the file; None keeps facts in memory only.
        fingerprint: of everything that they depend on.
    """

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint
        self._facts: dict[tuple[str, ...], Fact] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # cut off what a kill left half written, or the next fact would stand on the same line
            with path.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.decode(errors="replace").splitlines():
            try:
                fact = json.loads(line)
                if fact["run"] == self._fingerprint:
                    self._facts[tuple(fact["key"])] = fact["value"]
            except (ValueError, KeyError, TypeError):
                continue

    def __len__(self) -> int:
        return len(self._facts)

    def known(self, *key: str) -> Fact | None:
        return self._facts.get(key)

    def add(self, *key: str, value: Fact) -> Fact:
        """Keep a fact, on disk before this returns. Returns the value."""
        self._facts[key] = value
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": self._fingerprint, "key": key, "value": value}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return value

    def forget(self) -> None:
        """All of it, the file too."""
        self._facts.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
