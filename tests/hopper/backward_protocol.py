"""The protocol of a backward whose consumers share keys, as a small model: roles × pipes × named barriers (machine.py searches it).

roles       the producer warp, the sender warp where there is one, and one actor for each consumer (its four warps go in step)
pipes       q, do, k and v with the arrivals and the parities of the kernel; V in two halves, since each consumer overwrites its own
matmul      reads its operands from its issue until the wait that covers it
buffers     dS a half of each consumer and stage, and the halves of dQ: written at once, read from the issue of what reads them

Programs are straight and written by hand after the kernel, method by method: whoever changes who waits for what there changes it here.

Left out: the producer's wait for its last stages before it leaves (in one block without a cluster nothing shows it missing), numbers,
registers, fences and the proxies that they order, the way of dQ, dK and dV in global memory, and the turns of a deterministic backward,
which are plain arithmetic with tests of their own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .machine import NOTHING, Machine, Op, Pipe, Program, Variables, require, search

CONSUMERS = 2
GRADIENT = -7
"""What lies in K's and V's place once dK and dV are written there."""


class Fault(enum.Enum):
    """What a mutated kernel does wrong."""

    Q_RELEASED_EARLY = "Q given back before dK is waited for"
    DO_RELEASED_EARLY = "dO given back before dV is waited for"
    NO_SCORE_BARRIER = "dQ issued without waiting for the other consumer's dS"
    ONE_DS_BUFFER = "dS has one buffer"
    NO_KEYS_BARRIER = "dK written without waiting for the other consumer's last dQ"
    NO_SLOT_BARRIER = "a half of dQ written without waiting for the sender"
    SENT_UNREAD = "a half of dQ given back before it is read"
    NO_READ_BARRIER = "a consumer in turn writes dS without waiting for the reader of what lay there"
    NO_LAST_TURN = "the first consumer keeps its last turn"
    KEYS_NOT_COUNTED = "the barrier of the first Q does not count K's bytes"
    ARRIVAL_TOO_MANY = "the empty barriers of Q want one arrival too many"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """So many blocks of queries, and what the tiles say."""

    blocks: int
    q_stages: int = 2
    do_stages: int = 2
    sender: bool = False
    in_turn: bool = False
    early: bool = False
    """K arrives on the barrier of the first Q, V on that of the first dO."""
    fault: Fault | None = None


class Shared:
    """What the roles share."""

    def __init__(self, p: Protocol):
        self.variables = v = Variables()
        for i in range(1 + CONSUMERS + p.sender):
            v.add(f"actor {i}")
        self.q = Pipe(v, "Q", p.q_stages, CONSUMERS + (p.fault is Fault.ARRIVAL_TOO_MANY))
        self.do = Pipe(v, "dO", p.do_stages, CONSUMERS)
        self.k = Pipe(v, "K", 1, CONSUMERS)
        self.v = [Pipe(v, f"V half {w} ", 1, CONSUMERS) for w in range(CONSUMERS)]
        stages = 1 if p.fault is Fault.ONE_DS_BUFFER else 2
        self.ds = [[v.add(f"dS{i} of {w}", NOTHING) for w in range(CONSUMERS)] for i in range(stages)]
        self.slots = [v.add(f"dQ half {w}", NOTHING) for w in range(CONSUMERS)]
        self.scores_done, self.keys_read = (v.add(name) for name in ("dS written", "keys read"))
        self.written = [[v.add(f"dS{i} of {w} written") for i in range(2)] for w in range(CONSUMERS)]
        self.was_read = [[v.add(f"dS{i} read by {w}") for i in range(2)] for w in range(CONSUMERS)]
        self.turn = [v.add(f"turn {w}") for w in range(CONSUMERS)]
        self.free = [v.add(f"half {w} free") for w in range(CONSUMERS)]
        self.full = [v.add(f"half {w} full") for w in range(CONSUMERS)]

    def barriers(self) -> list[int]:
        pipes = [self.q, self.do, self.k, *self.v]
        named = [self.scores_done, self.keys_read, *self.free, *self.full, *self.turn]
        named += [at for stages in self.written + self.was_read for at in stages]
        return [at for pipe in pipes for at in pipe.full] + named


class Producer(Program):
    """backward_io.produce, or begin_tile and produce_begun."""

    def __init__(self, p: Protocol, shared: Shared):
        super().__init__()
        if not p.early or p.blocks:
            for pipe in (shared.k, *shared.v):
                self.load(pipe, 0)
        for n in range(p.blocks):
            self.load(shared.q, n)
            self.load(shared.do, n)

    def load(self, pipe: Pipe, n: int) -> None:
        self.acquire(pipe, n)
        self.step(Op.LOAD, pipe.content[n % pipe.stages], n)


class Sender(Program):
    """dq.send_all."""

    def __init__(self, p: Protocol, shared: Shared):
        super().__init__()
        for n in range(p.blocks):
            for w in range(CONSUMERS):
                self.step(Op.ARRIVE, shared.free[w], 2)
            for w in range(CONSUMERS):
                self.step(Op.ARRIVE, shared.full[w], 2)
                self.step(Op.WAIT, shared.full[w], n % 2)
                self.step(Op.READ, shared.slots[w], n)
                self.groups.append((shared.slots[w],))
            if p.fault is not Fault.SENT_UNREAD:
                self.wait_groups(0)


class Consumer(Program):
    """backward_consumer.Consumer, and what the other kinds share with it."""

    def __init__(self, p: Protocol, shared: Shared, me: int):
        super().__init__()
        self.p, self.shared, self.me = p, shared, me
        if not p.early:
            self.wait(shared.k, 0)
            for half in shared.v:
                self.wait(half, 0)
        for self.n in range(p.blocks):
            self.block()
        self.finish()

    def block(self) -> None:
        s = self.shared
        q, do = self.take(s.q), self.take(s.do)
        for keys in (s.k, s.v[self.me]):
            self.step(Op.READ, keys.content[0], 0)
        self.groups += [(q, s.k.content[0]), (do, s.v[self.me].content[0])]  # Sᵀ, dPᵀ
        self.wait_groups(0)
        self.write_ds(self.me)
        if self.p.fault is Fault.Q_RELEASED_EARLY:
            self.release(s.q, self.n)
        self.sync(s.scores_done, Fault.NO_SCORE_BARRIER)
        self.issue_dq()
        self.groups += [(do,), (q,)]  # dV, dK
        if self.p.fault is Fault.DO_RELEASED_EARLY:
            self.release(s.do, self.n)
        self.wait_groups(2)
        self.add_dq()
        self.wait_groups(0)
        self.give_back()

    def take(self, pipe: Pipe) -> int:
        self.wait(pipe, self.n)
        return self.read(pipe, self.n)

    def give_back(self) -> None:
        if self.p.fault is not Fault.DO_RELEASED_EARLY:
            self.release(self.shared.do, self.n)
        if self.p.fault is not Fault.Q_RELEASED_EARLY:
            self.release(self.shared.q, self.n)

    def stage(self) -> list[int]:
        return self.shared.ds[self.n % len(self.shared.ds)]

    def write_ds(self, half: int) -> None:
        self.step(Op.PUT, self.stage()[half], self.n)

    def issue_dq(self) -> None:
        for half in self.stage():
            self.step(Op.READ, half, self.n)
        self.groups.append((*self.stage(), self.shared.k.content[0]))

    def add_dq(self) -> None:
        if not self.p.sender:
            return
        s = self.shared
        if self.p.fault is not Fault.NO_SLOT_BARRIER:
            self.step(Op.ARRIVE, s.free[self.me], 2)
            self.step(Op.WAIT, s.free[self.me], self.n % 2)
        self.step(Op.PUT, s.slots[self.me], self.n)
        self.step(Op.ARRIVE, s.full[self.me], 2)

    def sync(self, barrier: int, left_out: Fault | None = None) -> None:
        if left_out is None or self.p.fault is not left_out:
            self.step(Op.ARRIVE, barrier, CONSUMERS)
            self.step(Op.WAIT, barrier, self.n % 2 if barrier == self.shared.scores_done else 0)

    def finish(self) -> None:
        """Each consumer writes dV over its own half of V, and dK over K once both have read it: each its rows, of which one is shown."""
        self.step(Op.PUT, self.shared.v[self.me].content[0], GRADIENT)
        self.sync(self.shared.keys_read, Fault.NO_KEYS_BARRIER)
        self.step(Op.PUT, self.shared.k.content[0], GRADIENT)


class TurnConsumer(Consumer):
    """backward_consumer.TurnConsumer. Block −1 is the one that was cleared."""

    def __init__(self, p: Protocol, shared: Shared, me: int):
        self.used: dict[int, int] = {}
        self.before = -1
        super().__init__(p, shared, me)

    def sync_named(self, barrier: int) -> None:
        self.step(Op.ARRIVE, barrier, CONSUMERS)
        self.step(Op.WAIT, barrier, self.used.get(barrier, 0) % 2)
        self.passed(barrier)

    def arrive(self, barrier: int) -> None:
        self.step(Op.ARRIVE, barrier, CONSUMERS)
        self.passed(barrier)

    def passed(self, barrier: int) -> None:
        self.used[barrier] = self.used.get(barrier, 0) + 1

    def read_barrier(self, who: int, n: int) -> int:
        return self.shared.was_read[who][n % 2]

    def block(self) -> None:
        s = self.shared
        if self.n == 0:
            self.first_steps()
        q, do = self.take(s.q), self.take(s.do)
        self.groups += [(q, s.k.content[0]), (do, s.v[self.me].content[0])]
        self.arrive(s.turn[1 - self.me])
        self.wait_groups(0)
        if self.p.fault is not Fault.NO_READ_BARRIER:
            self.sync_named(self.read_barrier(1 - self.me, self.n))
        self.write_ds(self.me)
        self.arrive(s.written[self.me][self.n % 2])
        self.sync_named(s.turn[self.me])
        self.issue_late_dq(self.n - 1)
        self.wait_groups(0)
        self.arrive(self.read_barrier(self.me, self.n - 1))
        self.groups += [(do,), (q,)]
        self.wait_groups(0)
        self.give_back()
        if self.n == self.p.blocks - 1:
            self.last_steps()

    def first_steps(self) -> None:
        s = self.shared
        self.step(Op.PUT, s.ds[-1][self.me], -1)
        self.arrive(s.written[self.me][1])
        self.arrive(self.read_barrier(self.me, 0))
        if self.me == 1:
            self.sync_named(s.turn[1])

    def issue_late_dq(self, n: int) -> None:
        s = self.shared
        self.sync_named(s.written[1 - self.me][n % 2])
        for half in s.ds[n % 2]:
            self.step(Op.READ, half, n)
        self.groups.append((*s.ds[n % 2], s.k.content[0]))

    def last_steps(self) -> None:
        if self.me == 0 and self.p.fault is not Fault.NO_LAST_TURN:
            self.arrive(self.shared.turn[1])
        self.issue_late_dq(self.n)
        self.wait_groups(0)
        self.sync_named(self.read_barrier(1 - self.me, self.n + 1))


def check(p: Protocol, every_order: bool = False) -> int:
    """How many states there are. Raises Violation."""
    shared = Shared(p)
    kind = TurnConsumer if p.in_turn else Consumer
    programs: list[Program] = [Producer(p, shared), *(kind(p, shared, me) for me in range(CONSUMERS))]
    if p.sender:
        programs.append(Sender(p, shared))
    pipes = [shared.q, shared.do, shared.k, *shared.v]
    loads = {at: pipe.full[i] for pipe in pipes for i, at in enumerate(pipe.content)}
    values = tuple(half.content[0] for half in shared.v)
    joined = {shared.q.content[0]: (shared.k.content[0],), shared.do.content[0]: values} if p.early else {}
    if p.fault is Fault.KEYS_NOT_COUNTED:
        del joined[shared.q.content[0]]
    machine = Machine(programs, shared.variables, loads, {}, joined=joined)
    successors = machine.successors if every_order else machine.fewer_successors
    states, ends = search(machine.start, successors, lambda state: is_over(machine, state, loads), machine.describe)
    for end in ends:
        require(not any(end[at] >> 1 for at in shared.barriers()), "a barrier with an arrival at the end")
    return states


def is_over(machine: Machine, state: tuple[int, ...], loads: dict[int, int]) -> bool:
    """Every program, and every load; K and V end as dK and dV."""
    ended = all(at == len(program) for at, program in zip(state, machine.programs, strict=False))
    return ended and all(state[at] >= 0 or state[at] == GRADIENT for at in loads)
