"""Every document says only what is there: its names, links, figures' files and examples."""

import os
import subprocess
import sys

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, anchors, code_words, links, python_program, result_files
from tests.docs.names import missing

TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
PROGRAMS = {name: program for name, text in TEXTS.items() if (program := python_program(text))}
WALKTHROUGH = "docs/walkthrough.md"


@pytest.mark.parametrize("document", TEXTS)
def test_links_resolve(document):
    assert [link for link in links(TEXTS[document]) if not resolves(ROOT / document, link)] == []


def resolves(document, link):
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not (target.is_relative_to(ROOT) and target.exists()):
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", TEXTS)
def test_results_behind_figures_exist(document):
    assert [path for path in result_files(TEXTS[document]) if not list(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("document", PROGRAMS)
def test_examples_run(document, tmp_path):
    script = tmp_path / "example.py"  # its line numbers are the document's
    script.write_text(PROGRAMS[document], encoding="utf-8")
    environment = {**os.environ, "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{document}:\n{done.stderr}"


def test_walkthrough_names_exist():
    if WALKTHROUGH not in TEXTS:
        pytest.skip("no walkthrough yet")
    words = code_words(TEXTS[WALKTHROUGH])
    assert any("." in word for word in words)
    assert missing(words) == []
