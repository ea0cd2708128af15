"""What a compiled kernel is made of: registers, spills, instructions and inner loops, read without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.disassembly import disassembly, run

MATMUL = "HGMMA"
ALL_DONE = "DEPBAR.LE gsb0, 0x0"
EXPONENTIAL = "MUFU.EX2"


@dataclass(frozen=True)
class Facts:
    registers: int  # of a thread at entry
    stack_bytes: int
    highest_register: int
    highest_producer_register: int  # between the two setmaxnreg
    counts: dict[str, int]
    loops: tuple[int, ...]  # instructions of each innermost loop with matmuls, in program order
    hidden: tuple[int, ...]  # exponentials in each before it waits for all matmuls


def facts(cubin: Path) -> Facts:
    usage = run("cuobjdump", "-res-usage", str(cubin))
    text = disassembly(cubin)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    instructions, labels = parse(text)
    words = ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG", "STL", "LDL", "MUFU.EX2")
    counts = {word: sum(word in line for line in instructions) for word in words}
    producer = text[text.index("USETMAXREG.DEALLOC") : text.index("USETMAXREG.TRY_ALLOC")]
    loops = inner_loops(instructions, labels)
    lengths, hidden = tuple(map(len, loops)), tuple(map(before_last_wait, loops))
    return Facts(int(registers), int(stack), _highest(text), _highest(producer), counts, lengths, hidden)


def _highest(text: str) -> int:
    return max(int(n) for n in re.findall(r"\bR(\d+)\b", text))


def parse(text: str) -> tuple[list[str], dict[str, int]]:
    """Instructions, and which of them each label stands before."""
    instructions, labels = [], {}
    for line in text.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found[1])
    return instructions, labels


def inner_loops(instructions: list[str], labels: dict[str, int]) -> list[list[str]]:
    """The loops that hold matmuls and no other such loop. Waits on barriers retry from out of line and jump back into a
    loop's middle: those jumps are no loops."""
    spans = []
    for at, instruction in enumerate(instructions):
        jump = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
        if jump and labels.get(jump[1], at + 1) <= at:
            begin = labels[jump[1]]
            if any(MATMUL in line for line in instructions[begin : at + 1]):
                spans.append((begin, at))
    inner = [s for s in spans if not any(o != s and s[0] <= o[1] < s[1] for o in spans)]
    return [instructions[begin : end + 1] for begin, end in inner]


def before_last_wait(loop: list[str]) -> int:
    wait = next(i for i, line in enumerate(loop) if ALL_DONE in line)
    return sum(EXPONENTIAL in line for line in loop[:wait])
