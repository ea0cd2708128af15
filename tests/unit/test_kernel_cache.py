"""Compiled kernels in memory and on disk: built once, whole or not at all, private, and never a reason to fail."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from flash3.kernel_cache import KernelCache, digest


class Builder:
    """Writes b"object" and counts."""

    def __init__(self, content: bytes = b"object", delay: float = 0.0) -> None:
        self.content, self.delay, self.calls = content, delay, 0

    def __call__(self, path: Path) -> None:
        self.calls += 1
        time.sleep(self.delay)
        path.write_bytes(self.content)


def load(path: Path) -> bytes:
    return path.read_bytes()


def test_memory_then_disk(tmp_path: Path) -> None:
    build = Builder()
    cache = KernelCache(tmp_path, "a")
    assert cache.get(("spec", 1), build, load) == b"object"
    assert cache.get(("spec", 1), build, load) == b"object"
    assert KernelCache(tmp_path, "a").get(("spec", 1), build, load) == b"object"
    assert build.calls == 1


def test_another_fingerprint_or_key_is_another_entry(tmp_path: Path) -> None:
    build = Builder()
    for fingerprint, key in (("a", 1), ("b", 1), ("a", 2)):
        KernelCache(tmp_path, fingerprint).get(key, build, load)
    assert build.calls == 3
    assert digest("a", "b") != digest("a\n'b'")


@pytest.mark.parametrize("damage", [b"", b"objec", b"xbject"])
def test_a_damaged_entry_is_a_miss(tmp_path: Path, damage: bytes) -> None:
    build = Builder()
    KernelCache(tmp_path, "a").get(1, build, load)
    (entry,) = tmp_path.glob("*.o")
    entry.write_bytes(damage)
    assert KernelCache(tmp_path, "a").get(1, build, load) == b"object"
    assert build.calls == 2
    assert [p.read_bytes() for p in tmp_path.glob("*.o")] == [b"object"]


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        KernelCache(tmp_path, "a").get(1, fails, load)
    assert list(tmp_path.glob("*.o")) == list(tmp_path.glob("*.tmp")) == []
    assert KernelCache(tmp_path, "a").get(1, Builder(), load) == b"object"


def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    KernelCache(folder, "a").get(1, Builder(), load)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o077 == 0 for p in folder.iterdir())


def test_a_folder_open_to_others_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert KernelCache(folder, "a").get(1, Builder(), load) == b"object"
    assert list(folder.iterdir()) == []


def test_an_unusable_folder_is_only_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = KernelCache(tmp_path / "file" / "kernels", "a")
    with pytest.warns(RuntimeWarning, match="in memory only"):
        assert cache.get(1, Builder(), load) == b"object"
    assert cache.get(2, Builder(b"other"), load) == b"other"


def test_no_folder(tmp_path: Path) -> None:
    assert KernelCache(None, "a").get(1, Builder(), load) == b"object"


def test_threads_build_a_key_once(tmp_path: Path) -> None:
    build, cache = Builder(delay=0.05), KernelCache(tmp_path, "a")
    threads = [threading.Thread(target=cache.get, args=(1, build, load)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert build.calls == 1


def _in_a_process(folder: Path, log: Path) -> None:
    def build(path: Path) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.2)
        path.write_bytes(b"object")

    assert KernelCache(folder, "a").get(1, build, load) == b"object"


def test_processes_build_a_key_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=_in_a_process, args=(tmp_path / "kernels", log)) for _ in range(8)]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
    assert [p.exitcode for p in processes] == [0] * 8
    assert len(log.read_text().splitlines()) == 1
