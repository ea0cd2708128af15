"""Compiled kernels, in memory and on disk.

An entry is one file, `<key>.<sha256 of its bytes>.o`: what does not match its own name is no entry, so a truncated or damaged file is a
miss, and a rename makes an entry appear whole or not at all. One lock per key: processes that start together compile a key once.
Loading an object runs code, so the folder must belong to this user and be closed to others; else the disk is not used, with a warning.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def default_folder() -> Path:
    """$XDG_CACHE_HOME/flash3, or ~/.cache/flash3."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flash3"


def digest(*parts: object) -> str:
    """A short name for a key: parts must have a repr that says everything and holds no addresses."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:32]


class KernelCache:
    """Objects by key. `build(path)` writes an object file, `load(path)` turns one into something to call.

    Args:
        folder: where objects are kept between processes; None: nowhere.
        fingerprint: everything else that the code depends on (sources, versions, target). Another fingerprint is another key.
    """

    def __init__(self, folder: Path | None, fingerprint: str) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._loaded: dict[Any, Any] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._guard = threading.Lock()

    def get(self, key: Any, build: Callable[[Path], None], load: Callable[[Path], Any]) -> Any:
        """The object of a hashable key: from memory, else from disk, else built (once, however many ask)."""
        found = self._loaded.get(key)
        if found is not None:
            return found
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._loaded:
                self._loaded[key] = self._from_disk(digest(self._fingerprint, key), build, load)
            return self._loaded[key]

    def has(self, key: Any) -> bool:
        """Whether the object of a key is in memory or on disk."""
        folder = self._usable_folder()
        return key in self._loaded or (folder is not None and _entry(folder, digest(self._fingerprint, key)) is not None)

    def warm(self, key: Any, build: Callable[[Path], None]) -> bool:
        """Have the object of a key on disk, without loading it. False: it was there already.

        Raises:
            OSError: there is no folder to keep it in.
        """
        folder = self._usable_folder()
        if folder is None:
            raise OSError("no folder to keep compiled kernels in: set FLASH3_CACHE_DIR to one that belongs to you alone")
        name = digest(self._fingerprint, key)
        with _locked(folder / f"{name}.lock"):
            if _entry(folder, name) is not None:
                return False
            return self._build_into(folder, name, build, load=lambda path: True)  # type: ignore[no-any-return]

    def _from_disk(self, name: str, build: Callable[[Path], None], load: Callable[[Path], Any]) -> Any:
        folder = self._usable_folder()
        if folder is None:
            return _build_and_load(build, load)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_locked(folder / f"{name}.lock"))
                path = _entry(folder, name)
                if path is not None:
                    return load(path)
            except OSError as error:
                self._give_up(folder, error)
                return _build_and_load(build, load)
            return self._build_into(folder, name, build, load)

    def _build_into(self, folder: Path, name: str, build: Callable[[Path], None], load: Callable[[Path], Any]) -> Any:
        with tempfile.TemporaryDirectory(prefix="flash3-") as scratch:
            built = Path(scratch) / "kernel.o"
            build(built)
            content = built.read_bytes()
            path = folder / f"{name}.{hashlib.sha256(content).hexdigest()}.o"
            try:
                write_whole(path, content)
            except OSError as error:
                self._give_up(folder, error)
                return load(built)
            return load(path)

    def _usable_folder(self) -> Path | None:
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self._folder.stat()
        except OSError as error:
            self._give_up(self._folder, error)
            return None
        if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            self._give_up(self._folder, "it belongs to another user, or others may write to it")
            return None
        return self._folder

    def _give_up(self, folder: Path, why: object) -> None:
        self._folder = None
        warnings.warn(f"flash3 keeps compiled kernels in memory only: {folder} cannot be used ({why})", RuntimeWarning, stacklevel=2)


def _build_and_load(build: Callable[[Path], None], load: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="flash3-") as scratch:
        path = Path(scratch) / "kernel.o"
        build(path)
        return load(path)


def _entry(folder: Path, name: str) -> Path | None:
    """The entry of that name whose bytes match; what does not match is removed."""
    for path in sorted(folder.glob(f"{name}.*.o")):
        content = path.read_bytes()
        if path.name == f"{name}.{hashlib.sha256(content).hexdigest()}.o":
            return path
        path.unlink(missing_ok=True)
    return None


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put content into a file at once: a reader, and whoever comes after a crash, sees the old file or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock between processes. It goes with the process that holds it, however that ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
