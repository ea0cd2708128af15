"""settings: one table of environment variables, process-wide values, and overrides that stay in their context."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import flash3.settings
from flash3.settings import VARIABLES, settings


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = {v.field: getattr(settings, v.field) for v in VARIABLES}
    yield
    for field, value in before.items():
        setattr(settings, field, value)


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLASH3_")}
    clean["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=False)


SHOW = "from flash3.settings import settings as s; print(s.backend, s.check_values, s.cache_dir)"


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, "None False None"),
        ({"FLASH3_BACKEND": " cpu ", "FLASH3_CHECK": "Yes", "FLASH3_CACHE_DIR": "/x"}, "cpu True /x"),
        ({"FLASH3_BACKEND": "", "FLASH3_CHECK": "", "FLASH3_CACHE_DIR": ""}, "None False None"),
        ({"FLASH3_CHECK": "off"}, "None False None"),
    ],
)
def test_environment(environment: dict[str, str], shown: str) -> None:
    assert in_a_process(SHOW, **environment).stdout.strip() == shown


def test_bad_environment() -> None:
    assert "ValueError: FLASH3_CHECK must be 0 or 1, got 'maybe'" in in_a_process(SHOW, FLASH3_CHECK="maybe").stderr


def test_values_are_the_process_s() -> None:
    settings.check_values = True
    assert flash3.settings.check_values is True
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(settings.check_values))
    thread.start()
    thread.join()
    assert seen == [True]


def test_override_ends_with_its_block() -> None:
    before = settings.backend
    with settings.override(backend="a"):
        assert settings.backend == "a"
        with settings.override(check_values=True, backend="b"):
            assert (settings.backend, settings.check_values) == ("b", True)
        assert settings.backend == "a"
    assert settings.backend == before


def test_override_ends_with_an_exception_too() -> None:
    before = settings.backend
    with pytest.raises(KeyError), settings.override(backend="a"):
        raise KeyError
    assert settings.backend == before


def test_override_stays_in_its_thread() -> None:
    seen: list[str | None] = []
    with settings.override(backend="mine"):
        thread = threading.Thread(target=lambda: seen.append(settings.backend))
        thread.start()
        thread.join()
    assert seen == [settings.backend]


def test_unknown_names() -> None:
    for attempt in (
        lambda: settings.chekc_values,
        lambda: setattr(settings, "chekc_values", True),
        lambda: settings.override(chekc_values=True).__enter__(),
    ):
        with pytest.raises(AttributeError, match="no setting 'chekc_values'; known: backend, check_values, cache_dir"):
            attempt()


def test_every_setting_has_a_variable_with_a_meaning() -> None:
    assert all(v.name.startswith("FLASH3_") and v.meaning for v in VARIABLES)
    assert len({v.field for v in VARIABLES}) == len({v.name for v in VARIABLES}) == len(VARIABLES)
