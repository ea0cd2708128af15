"""A machine of actors that share barriers, stages and buffers, and the search over every order of their steps. protocol.py says what the
actors of the forward kernel do, and what all this leaves out.

barrier     2 · arrivals + phase bit. An mbarrier is waited for by parity, as in PTX; a named barrier likewise, by how often it was used
stage       number n of the load that lies there, ~n from the issue of load n until its bytes arrive (two events)
O buffer    1 while TMA reads it, until an event of its own

A step that reads a stage checks that it finds the load that it expects. The reader may then be at any point of the stretch from there to
the wait that ends it, so a load issued meanwhile is an overwrite. Beginning to read is one step with what comes before and ending to read
is one step with what comes after: the longest stretch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

State = tuple[int, ...]
NOTHING = 1 << 20
"""In a stage before its first load."""


class Op(enum.Enum):
    WAIT = "wait until the phase bit is no longer value"
    ARRIVE = "arrive; the phase ends with arrival number value"
    LOAD = "issue load number value into a stage"
    PUT = "write value into a stage, at once"
    READ = "begin to read a stage, which must hold value"
    WAIT_STORE = "wait until TMA has read O"
    WRITE = "write one warp's rows of O"
    STORE = "send O, which value warps have written"
    TICKET = "take a ticket, which must be value"
    RESET = "set the counter back, which must be value"
    LEAVE_STAGES = "leave, when nobody may be at a stage"
    LEAVE_OUTPUT = "leave, when TMA may not be at O"


class Step(NamedTuple):
    op: Op
    at: int  # index into the state
    value: int
    reads: frozenset[int]  # stages that the actor may be reading while it stands before this step


class Violation(Exception):
    """What a step must not find."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Variables:
    """Where everything lies in a state."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.start: list[int] = []

    def add(self, name: str, value: int = 0) -> int:
        self.names.append(name)
        self.start.append(value)
        return len(self.names) - 1


class Pipe:
    """A ring and its barriers. Loads are numbered through: number n goes into stage n % stages in round n // stages."""

    def __init__(self, variables: Variables, name: str, stages: int, empty_arrivals: int):
        self.stages, self.empty_arrivals = stages, empty_arrivals
        self.content = [variables.add(f"{name}{i}", NOTHING) for i in range(stages)]
        self.full = [variables.add(f"{name}{i} full") for i in range(stages)]
        self.empty = [variables.add(f"{name}{i} empty") for i in range(stages)]


class Program:
    """The steps of one actor, in order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.groups: list[tuple[int, ...]] = []  # matmuls on their way (or an ldmatrix, or a look into the box), and what they read
        self.ending: list[tuple[int, ...]] = []  # over by the next step

    def step(self, op: Op, at: int = 0, value: int = 0) -> None:
        self.steps.append(Step(op, at, value, frozenset(at for group in self.ending + self.groups for at in group)))
        self.ending = []

    def wait_groups(self, outstanding: int) -> None:
        done = len(self.groups) - outstanding
        self.ending += self.groups[:done]
        self.groups = self.groups[done:]

    def acquire(self, pipe: Pipe, n: int) -> None:
        self.step(Op.WAIT, pipe.empty[n % pipe.stages], 1 - n // pipe.stages % 2)

    def wait(self, pipe: Pipe, n: int) -> None:
        self.step(Op.WAIT, pipe.full[n % pipe.stages], n // pipe.stages % 2)

    def read(self, pipe: Pipe, n: int, value: int | None = None) -> int:
        self.step(Op.READ, pipe.content[n % pipe.stages], n if value is None else value)
        return pipe.content[n % pipe.stages]

    def release(self, pipe: Pipe, n: int) -> None:
        self.step(Op.ARRIVE, pipe.empty[n % pipe.stages], pipe.empty_arrivals)


class Machine:
    """States begin with how far each program has come. full_of: the barrier of each stage that TMA fills; written_of: for each O buffer,
    where it says how many warps have written it; source_of: for a stage that is filled from another stage, which one; joined: for a stage
    whose barrier other loads arrive at too, where those go."""

    def __init__(
        self,
        programs: Iterable[Program],
        variables: Variables,
        full_of: dict[int, int],
        written_of: dict[int, int],
        source_of: dict[int, int] | None = None,
        joined: dict[int, tuple[int, ...]] | None = None,
    ):
        self.programs = [tuple(program.steps) for program in programs]
        self.names, self.start = variables.names, tuple(variables.start)
        self.full_of, self.written_of, self.source_of = full_of, written_of, source_of or {}
        self.joined = joined or {}

    def is_over(self, state: State) -> bool:
        """Every program, and every load and store."""
        ended = all(at == len(program) for at, program in zip(state, self.programs, strict=False))
        return ended and all(state[at] >= 0 for at in self.full_of) and not any(state[at] for at in self.written_of)

    def describe(self, state: State) -> str:
        """What each program stands before."""
        standing = ((name, p[at]) for name, at, p in zip(self.names, state, self.programs, strict=False) if at < len(p))
        return "; ".join(f"{name}: {step.op.value} ({self.names[step.at]}, {step.value})" for name, step in standing)

    def readers(self, state: State) -> frozenset[int]:
        """Every stage that somebody may be reading."""
        copied = (source for target, source in self.source_of.items() if state[target] < 0)
        return frozenset(copied).union(*(p[at].reads for at, p in zip(state, self.programs, strict=False) if at < len(p)))

    def successors(self, state: State) -> Iterator[State]:
        """Every order."""
        for actor, program in enumerate(self.programs):
            if state[actor] < len(program):
                yield from self.after(state, actor, program[state[actor]])
        for at, full in self.full_of.items():
            if state[at] < 0 and all(state[other] >= 0 for other in self.joined.get(at, ())):  # its bytes arrive, the last of the phase
                yield with_changes(state, (at, ~state[at]), (full, state[full] ^ 1))
        for at in self.written_of:
            if state[at]:  # TMA has read O
                yield with_changes(state, (at, 0))

    def fewer_successors(self, state: State) -> Iterable[State]:
        """A wait that would pass, the beginning of a read, or an arrival of who reads nothing goes alone: no other step changes what it
        finds, nor the other way round, and the reader has the longer stretch."""
        for actor, program in enumerate(self.programs):
            if state[actor] < len(program):
                step = program[state[actor]]
                free = step.op is Op.ARRIVE and not step.reads
                if step.op is Op.READ or free or (step.op is Op.WAIT and state[step.at] & 1 != step.value):
                    return self.after(state, actor, step)
        return self.successors(state)

    def after(self, state: State, actor: int, step: Step) -> Iterator[State]:
        """Nothing if the step must wait."""
        op, at, value, _ = step
        here, name = state[at], self.names[at]
        change = (actor, state[actor] + 1)
        new = here
        if op is Op.WAIT or op is Op.WAIT_STORE:
            if here & 1 == (value if op is Op.WAIT else 1):
                return
        elif op is Op.ARRIVE:
            new = here + 2 if here // 2 + 1 < value else here & 1 ^ 1
        elif op is Op.READ:
            require(here == value, f"{name} holds {here} and not {value}")
        elif op is Op.LOAD or op is Op.PUT:
            require(here >= 0 or op is Op.PUT, f"{name}: load {value} issued while {~here} is on its way")
            require(at not in self.readers(state), f"{name}: {value} overwrites {here} under a reader")
            new = ~value if op is Op.LOAD else value
        elif op is Op.WRITE:
            require(not here, f"{name}: written while TMA reads it")
            written = self.written_of[at]
            at, new = written, state[written] + 1
        elif op is Op.STORE:
            written = self.written_of[at]
            require(state[written] == value, f"{name}: sent when {state[written]} of {value} warps have written it")
            yield with_changes(state, change, (at, 1), (written, 0))
            return
        elif op is Op.TICKET or op is Op.RESET:
            require(here == value, f"{name}: {here} and not {value}")
            new = here + 1 if op is Op.TICKET else 0
        elif op is Op.LEAVE_STAGES:
            busy = self.readers(state) & self.full_of.keys() or any(state[stage] < 0 for stage in self.full_of)
            require(not busy, "stages in use when their producer leaves")
            at, new = change
        elif op is Op.LEAVE_OUTPUT:
            require(not here, f"{name}: TMA reads it when its consumer leaves")
        yield with_changes(state, change, (at, new))


def with_changes(state: State, *changes: tuple[int, int]) -> State:
    new = list(state)
    for at, value in changes:
        new[at] = value
    return tuple(new)


def search(
    start: State,
    successors: Callable[[State], Iterable[State]],
    is_over: Callable[[State], bool],
    describe: Callable[[State], str] = str,
) -> tuple[int, set[State]]:
    """Breadth first: how many states, and the last ones. Raises Violation: from a step, or where nobody can go on before it is over."""
    seen, edge, ends = {start}, [start], set()
    while edge:
        reached = []
        for state in edge:
            alone = True
            for new in successors(state):
                alone = False
                if new not in seen:
                    seen.add(new)
                    reached.append(new)
            if alone:
                require(is_over(state), f"deadlock. {describe(state)}")
                ends.add(state)
        edge = reached
    return len(seen), ends
