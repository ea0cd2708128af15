"""The project's documents, and what can be read off them without running anything."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])

_FENCE = re.compile(r"^( *)(```+|~~~+) *(.*)$")
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|(?:src|href)=\"([^\"]+)\"")
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def fenced_blocks(text: str) -> list[tuple[int, str, list[str]]]:
    """(number of the first code line, info string, lines) of each fenced block; line numbers start at 1."""
    blocks: list[tuple[int, str, list[str]]] = []
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        match = _FENCE.match(line)
        if not fence and match:
            indent, fence, info = match.groups()
            blocks.append((number + 1, info.strip(), []))
        elif fence and line.strip() == fence:
            fence = ""
        elif fence:
            blocks[-1][2].append(line.removeprefix(indent))
    return blocks


def prose(text: str) -> str:
    """The text with its fenced blocks blanked, line for line."""
    lines = text.splitlines()
    for first, _, code in fenced_blocks(text):
        opening, closing = first - 2, first - 1 + len(code)
        lines[opening : closing + 1] = [""] * (len(code) + 2)
    return "\n".join(lines)


def python_program(text: str) -> str:
    """A document's runnable Python blocks as one program, each line where it stands in the document.

    A block opened with more than the word python (```python no-run, ```python gpu) is left out.
    """
    program = [""] * len(text.splitlines())
    for first, info, code in fenced_blocks(text):
        if info == "python":
            program[first - 1 : first - 1 + len(code)] = code
    return "\n".join(program) if any(program) else ""


def code_words(text: str) -> list[str]:
    """What stands between single backticks."""
    return _CODE.findall(prose(text))


def links(text: str) -> list[str]:
    """Targets of links and pictures that lead inside the repository."""
    targets = [markdown or html for markdown, html in _LINK.findall(_CODE.sub("", prose(text)))]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names of a document's headings, as a forge makes them."""
    headings = re.findall(r"^#+ +(.*?) *#*$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def result_files(text: str) -> list[str]:
    """Every path under benchmarks/results/ that a document names, code included."""
    return [path.rstrip(".") for path in re.findall(r"\bbenchmarks/results/[\w./*-]+", text)]
