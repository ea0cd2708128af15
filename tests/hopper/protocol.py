"""The forward kernel's protocol as a small model: roles × pipes × turns (machine.py searches it).

roles       one actor for the producer warp, and `warps` for each consumer: 1 stands for all four, which then go in step
pipes       q, k, v and the box of work tiles, with the arrivals and the parities of the kernel
matmul      reads its operands from its issue until the wait that covers it; ldmatrix reads Q until the first matmul is over
turns       named barriers, and so are those around a consumer's rows of O

Programs are straight: sizes and walks are fixed beforehand, and who reads the box must find the tile that its program goes on with.
They are written by hand after the kernel, method by method: whoever changes who waits for what there changes it here.

Left out: numbers, registers, and which bytes of a stage are meant (so a first block of which half is read is a whole one); the 32 threads
of a warp, and with warps = 1 the four warps of a consumer; fences and the proxies that they order (the words of the box are read and
written at once, and so are rows of O); O's way from TMA to global memory; L; the search for a tile among sequences; other blocks of the
grid (the test of tickets has their counter, and that alone); time, so fairness: whatever can go on does so in the end. That the producer
waits for its last stages before it leaves is the pipeline library's rule: in one block without a cluster nothing else shows it missing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flash3.backends.hopper.budget import WORK_STAGES
from flash3.backends.hopper.tiles import Overlap, QuerySource, Turns

from .machine import Machine, Op, Pipe, Program, Variables, require, search

NO_TILE = -1
"""The last word in the box."""


class Fault(enum.Enum):
    """What a mutated kernel does wrong."""

    Q_RELEASED_AFTER_LDMATRIX = "Q released while ldmatrix may still read it"
    SHARED_Q_RELEASED_EARLY = "Q in shared memory released after the first Q·Kᵀ"
    K_RELEASED_EARLY = "K released before its matmul is waited for"
    K_NOT_KEPT = "K released before it is known whether the block is taken again"
    V_RELEASED_EARLY = "V released before its matmul is waited for"
    V_NOT_AWAITED = "V read without a wait"
    ARRIVAL_TOO_FEW = "the empty barriers of K want one arrival too few"
    ARRIVAL_TOO_MANY = "the empty barriers of K want one arrival too many"
    BLOCK_KEPT = "a block that is passed over is not released"
    TURN_KEPT = "one turn is not passed on"
    NO_FIRST_TURN = "nobody gives consumer 0 its first turn"
    O_REUSED = "O written before its store has read it"
    O_WRITTEN_EARLY = "O written without the barrier before it"
    O_SENT_EARLY = "O sent without the barrier before it"
    O_LEFT = "a consumer leaves while TMA reads O"
    BOX_UNGUARDED = "a tile put into the box without a free slot"
    NO_TAIL = "the producer leaves while its stages are in use"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """walks[tile][consumer]: the blocks that it passes over on the right, visits, and passes over on the left; their sum is the tile's.
    masked: how many blocks after a tile's first go by their maximum; those after them are taken again, every one."""

    walks: tuple[tuple[tuple[int, int, int], ...], ...]
    stages: int
    query_source: QuerySource = QuerySource.REGISTERS
    overlap: Overlap = Overlap.SOFTMAX_UNDER_PV
    turns: Turns = Turns.FREE
    parts: int = 1
    o_parts: int = 1
    warps: int = 1
    masked: int = 0
    slots: int = WORK_STAGES
    fault: Fault | None = None

    @property
    def consumers(self) -> int:
        return len(self.walks[0])


class Shared:
    """What the roles share."""

    def __init__(self, p: Protocol):
        arrivals = p.consumers * p.warps
        self.variables = v = Variables()
        for i in range(1 + arrivals):
            v.add(f"actor {i}")
        wrong = {Fault.ARRIVAL_TOO_FEW: -1, Fault.ARRIVAL_TOO_MANY: 1}.get(p.fault, 0) if p.fault else 0
        self.q = Pipe(v, "Q", p.consumers, p.warps)
        self.k = Pipe(v, "K", p.stages, arrivals + wrong)
        self.v = Pipe(v, "V", p.stages, arrivals)
        self.box = Pipe(v, "box", p.slots, arrivals)
        self.turn = [v.add(f"turn {i}") for i in range(p.consumers)]
        self.sync = [v.add(f"rows of O {i}") for i in range(p.consumers)]
        self.agree = [v.add(f"agreement {i}") for i in range(p.consumers)]
        self.output = [v.add(f"O {i}") for i in range(p.consumers)]
        self.written = [v.add(f"O {i} written") for i in range(p.consumers)]
        self.counter = v.add("counter")


class Producer(Program):
    """forward.produce and schedule.Dispatcher, of the only block of a grid."""

    def __init__(self, p: Protocol, shared: Shared):
        super().__init__()
        self.p, self.shared = p, shared
        self.loads = dict.fromkeys((shared.q, shared.k, shared.v), 0)
        self.send(0)
        for tile, ways in enumerate(p.walks):
            keys_first = p.query_source is QuerySource.SHARED
            if keys_first:
                self.load(shared.k)
            for _ in range(p.consumers):
                self.load(shared.q)
            if not keys_first:
                self.load(shared.k)
            for _ in range(sum(ways[0]) - 1):
                self.load(shared.v)
                self.load(shared.k)
            self.step(Op.TICKET, shared.counter, tile)
            self.load(shared.v)
            self.send(tile + 1)
        self.step(Op.RESET, shared.counter, len(p.walks))
        if p.fault is not Fault.NO_TAIL:
            for pipe in (shared.k, shared.v):  # the stage filled last, as if for its next load
                self.acquire(pipe, self.loads[pipe] + pipe.stages - 1)
            for stage in range(p.consumers):  # each is another consumer's
                self.acquire(shared.q, self.loads[shared.q] + stage)
        self.step(Op.LEAVE_STAGES)

    def send(self, slot: int) -> None:
        box = self.shared.box
        if self.p.fault is not Fault.BOX_UNGUARDED:
            self.acquire(box, slot)
        self.step(Op.PUT, box.content[slot % box.stages], tile_in_box(self.p, slot))
        self.step(Op.ARRIVE, box.full[slot % box.stages], 1)

    def load(self, pipe: Pipe) -> None:
        n = self.loads[pipe]
        self.acquire(pipe, n)
        self.step(Op.LOAD, pipe.content[n % pipe.stages], n)
        self.loads[pipe] = n + 1


class Consumer(Program):
    """One warp of a consumer: forward.Consumer and InOrderConsumer, queries, barriers.Turn, store and schedule.Follower."""

    def __init__(self, p: Protocol, shared: Shared, me: int, warp: int):
        super().__init__()
        self.p, self.shared, self.me, self.warp = p, shared, me, warp
        self.tile = self.block = self.turns = self.syncs = self.agreements = self.output_block = 0
        self.has_queries = False
        if me == p.consumers - 1 and p.fault is not Fault.NO_FIRST_TURN:
            self.pass_turn()
        self.follow(0)
        for self.tile, ways in enumerate(p.walks):
            self.take_queries()
            self.attend(*ways[me])
            for _ in range(p.o_parts):
                self.write_part()
            self.follow(self.tile + 1)
        if warp == 0:  # the warp that talks to TMA
            if p.fault is not Fault.O_LEFT:
                self.step(Op.WAIT_STORE, shared.output[me])
            self.step(Op.LEAVE_OUTPUT, shared.output[me])

    def follow(self, slot: int) -> None:
        self.wait(self.shared.box, slot)
        self.groups.append((self.read(self.shared.box, slot, tile_in_box(self.p, slot)),))
        self.wait_groups(0)
        self.release(self.shared.box, slot)

    def attend(self, passed_right: int, seen: int, passed_left: int) -> None:
        in_order = self.p.overlap is Overlap.IN_ORDER
        self.pass_over(passed_right)
        self.first_block(in_order)
        for i in range(seen - 1):
            if in_order:
                self.next_block_in_order(i < self.p.masked)
            else:
                self.next_block(i < self.p.masked)
        self.release_queries()
        if in_order:
            self.pass_turn()
        else:
            self.add_output()
        self.pass_over(passed_left)

    def first_block(self, in_order: bool) -> None:
        self.issue_scores()
        self.scores_done(0)
        if self.p.query_source is QuerySource.REGISTERS or self.p.fault is Fault.SHARED_Q_RELEASED_EARLY:
            self.release_queries()
        if in_order:
            self.take_turn()
            self.add_output()

    def next_block(self, masked: bool) -> None:
        self.take_turn()
        self.issue_scores()
        self.issue_output()
        self.pass_turn()
        self.scores_done(1, keep=not masked)
        self.output_done()
        if not masked:
            self.settle()

    def next_block_in_order(self, masked: bool) -> None:
        self.issue_scores()
        self.pass_turn()
        self.scores_done(0, keep=not masked)
        if not masked:
            self.settle()
        self.take_turn()
        self.add_output()

    def settle(self) -> None:
        self.sync(self.shared.agree[self.me], self.p.warps, self.agreements)
        self.agreements += 1
        self.groups.append((self.read(self.shared.k, self.block),))
        self.wait_groups(0)
        if self.p.fault not in (Fault.K_NOT_KEPT, Fault.K_RELEASED_EARLY):
            self.release(self.shared.k, self.block)
        self.block += 1

    def pass_over(self, blocks: int) -> None:
        for _ in range(blocks):
            for pipe, n in ((self.shared.k, self.block), (self.shared.v, self.output_block)):
                self.wait(pipe, n)
                if self.p.fault is not Fault.BLOCK_KEPT:
                    self.release(pipe, n)
            self.block, self.output_block = self.block + 1, self.output_block + 1

    def take_queries(self) -> None:
        self.wait(self.shared.q, self.my_queries())
        self.has_queries = True
        self.queries = self.read(self.shared.q, self.my_queries())
        if self.p.query_source is QuerySource.REGISTERS:
            self.groups.append((self.queries,))  # ldmatrix, until the first matmul is over
            if self.p.fault is Fault.Q_RELEASED_AFTER_LDMATRIX:
                self.release_queries()

    def release_queries(self) -> None:
        if self.has_queries:
            self.release(self.shared.q, self.my_queries())
        self.has_queries = False

    def my_queries(self) -> int:
        """Which load of Q: one for each consumer in every tile."""
        return self.tile * self.p.consumers + self.me

    def issue_scores(self) -> None:
        self.wait(self.shared.k, self.block)
        k = self.read(self.shared.k, self.block)
        self.groups += [(k, self.queries) if self.p.query_source is QuerySource.SHARED else (k,)] * self.p.parts
        if self.p.fault is Fault.K_RELEASED_EARLY:
            self.release(self.shared.k, self.block)

    def scores_done(self, outstanding: int, keep: bool = False) -> None:
        """`keep`: the block may be taken again."""
        for part in range(self.p.parts):
            self.wait_groups(self.p.parts - 1 - part + outstanding)
        if self.p.fault is not Fault.K_RELEASED_EARLY and (not keep or self.p.fault is Fault.K_NOT_KEPT):
            self.release(self.shared.k, self.block)
        self.block += not keep

    def issue_output(self) -> None:
        if self.p.fault is not Fault.V_NOT_AWAITED:
            self.wait(self.shared.v, self.output_block)
        self.groups.append((self.read(self.shared.v, self.output_block),))
        if self.p.fault is Fault.V_RELEASED_EARLY:
            self.release(self.shared.v, self.output_block)

    def output_done(self) -> None:
        self.wait_groups(0)
        if self.p.fault is not Fault.V_RELEASED_EARLY:
            self.release(self.shared.v, self.output_block)
        self.output_block += 1

    def add_output(self) -> None:
        self.issue_output()
        self.output_done()

    def take_turn(self) -> None:
        if self.p.turns is Turns.PING_PONG:
            self.sync(self.shared.turn[self.me], 2 * self.p.warps, self.turns)
            self.turns += 1

    def pass_turn(self) -> None:
        kept = self.p.fault is Fault.TURN_KEPT and self.me == 0 and self.turns == 1
        if self.p.turns is Turns.PING_PONG and not kept:
            self.step(Op.ARRIVE, self.shared.turn[(self.me + 1) % self.p.consumers], 2 * self.p.warps)

    def sync(self, barrier: int, arrivals: int, used: int) -> None:
        self.step(Op.ARRIVE, barrier, arrivals)
        self.step(Op.WAIT, barrier, used % 2)

    def sync_output(self, left_out: Fault) -> None:
        if self.p.fault is not left_out:
            self.sync(self.shared.sync[self.me], self.p.warps, self.syncs)
            self.syncs += 1

    def write_part(self) -> None:
        output = self.shared.output[self.me]
        if self.warp == 0 and self.p.fault is not Fault.O_REUSED:
            self.step(Op.WAIT_STORE, output)
        self.sync_output(Fault.O_WRITTEN_EARLY)
        self.step(Op.WRITE, output)
        self.sync_output(Fault.O_SENT_EARLY)
        if self.warp == 0:
            self.step(Op.STORE, output, self.p.warps)


def tile_in_box(p: Protocol, slot: int) -> int:
    return slot if slot < len(p.walks) else NO_TILE


def check(p: Protocol, every_order: bool = False) -> int:
    """How many states there are. Raises Violation."""
    shared = Shared(p)
    consumers = [Consumer(p, shared, i, warp) for i in range(p.consumers) for warp in range(p.warps)]
    loads = {at: pipe.full[i] for pipe in (shared.q, shared.k, shared.v) for i, at in enumerate(pipe.content)}
    machine = Machine([Producer(p, shared), *consumers], shared.variables, loads, dict(zip(shared.output, shared.written, strict=True)))
    successors = machine.successors if every_order else machine.fewer_successors
    states, ends = search(machine.start, successors, machine.is_over, machine.describe)
    for end in ends:
        barriers = [at for pipe in (shared.q, shared.k, shared.v, shared.box) for at in pipe.full + pipe.empty] + shared.sync + shared.agree
        require(not any(end[at] >> 1 for at in barriers), "a barrier with an arrival at the end")
        turns = [end[at] >> 1 for at in shared.turn]
        first = p.warps if p.turns is Turns.PING_PONG else 0
        require(turns == [first] + [0] * (p.consumers - 1), f"turns end as {turns}: not as after the very first one passed on")
        require(not any(end[at] for at in shared.written) and not end[shared.counter], "O or the counter not as at the start")
    return states
