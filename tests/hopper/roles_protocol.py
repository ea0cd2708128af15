"""The protocol of a backward with roles as a small model, for a block or a cluster of two (machine.py searches it).

roles       of each block the producer warp, and one actor for each consumer (its four warps go in step): scores, gradients, dQ
pipes       q, do with the arrivals and the parities of the kernel
exchange    P, then dS in its place: written at once. The copy to the other block reads it until its bytes have come. `full` is shown as two
            barriers, one for each of what it counts
end         a block is gone when all actors that meet there have come; nobody may arrive at a barrier of a block that is gone

Programs are straight and written by hand after the kernel, method by method: whoever changes who waits for what there changes it here.
Left out: what backward_protocol.py leaves out too.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .machine import NOTHING, Machine, Op, Pipe, Program, Variables, require, search

READERS = 2
"""Consumers that read Q and dO."""
CONSUMERS = 3
PROBABILITIES = 1000
"""P of block n of the queries is this more than n."""
GRADIENT = -7
"""What lies in K's and V's place once dK and dV are written there."""


class Fault(enum.Enum):
    """What a mutated kernel does wrong."""

    Q_RELEASED_EARLY = "Q given back before dK is waited for"
    DO_RELEASED_EARLY = "dO given back before dV is waited for"
    P_NOT_AWAITED = "P read without a wait"
    DS_NOT_AWAITED = "dQ issued without waiting for dS"
    OTHERS_NOT_AWAITED = "dQ issued without waiting for the other block's dS"
    FREE_NOT_AWAITED = "P written without waiting for who reads dS there"
    FREED_AT_HOME = "who has read the other block's dS does not tell it"
    NO_KEYS_BARRIER = "dK written without waiting for who reads K"
    NO_VALUES_BARRIER = "dV written without waiting for who reads V"
    NO_LAST_MEETING = "a block ends without waiting for the other"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """So many blocks of queries, and what the tiles say."""

    blocks: int
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    cluster: int = 1
    fault: Fault | None = None


class Block:
    """What one block's roles share."""

    def __init__(self, v: Variables, p: Protocol, rank: int):
        at = f" of {rank}"
        self.q, self.do = Pipe(v, f"Q{at} ", p.q_stages, READERS), Pipe(v, f"dO{at} ", p.do_stages, READERS)
        self.k, self.v = v.add(f"K{at}", 0), v.add(f"V{at}", 0)
        self.ds, self.came = ([v.add(f"{name}{i}{at}", NOTHING) for i in range(p.ds_stages)] for name in ("dS", "other dS"))
        self.written, self.arrived, self.free, self.ready = (
            [v.add(f"dS{i}{at} {word}") for i in range(p.ds_stages)] for word in ("written", "arrived", "free", "holds P")
        )
        self.keys_read, self.values_read = v.add(f"keys{at} read"), v.add(f"values{at} read")
        self.ended, self.gone = v.add(f"roles{at} ended"), v.add(f"block {rank} gone")

    def loads(self) -> dict[int, int]:
        """Each stage that is filled in the background, and its barrier."""
        return {c: f for pipe in (self.q, self.do) for c, f in zip(pipe.content, pipe.full, strict=True)} | dict(
            zip(self.came, self.arrived, strict=True)
        )


class Role(Program):
    """What all have in common."""

    def __init__(self, p: Protocol, blocks: list[Block], rank: int):
        super().__init__()
        self.p, self.blocks, self.own = p, blocks, blocks[rank]
        self.others = [b for b in blocks if b is not self.own]
        for self.n in range(p.blocks):
            self.block()
        self.finish()
        for b in [self.own] if p.fault is Fault.NO_LAST_MEETING else blocks:
            self.step(Op.ARRIVE, b.ended, (1 + CONSUMERS) * (1 if p.fault is Fault.NO_LAST_MEETING else p.cluster))

    def block(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        pass

    def of(self, stages: list[int]) -> int:
        return stages[self.n % len(stages)]

    def wait_round(self, stages: list[int]) -> None:
        self.step(Op.WAIT, self.of(stages), self.n // len(stages) % 2)

    def wait_room(self, stages: list[int]) -> None:
        self.step(Op.WAIT, self.of(stages), 1 - self.n // len(stages) % 2)

    def take(self, pipe: Pipe) -> int:
        self.wait(pipe, self.n)
        return self.read(pipe, self.n)

    def arrive_at(self, block: Block, barrier: int, count: int) -> None:
        if block is not self.own:
            self.step(Op.READ, block.gone, 0)
        self.step(Op.ARRIVE, barrier, count)

    def matmuls(self, *reads: int) -> None:
        self.groups.append(reads)


class Producer(Role):
    """backward_io.produce."""

    def block(self) -> None:
        for pipe in (self.own.q, self.own.do):
            self.acquire(pipe, self.n)
            self.step(Op.LOAD, self.of(pipe.content), self.n)


class ScoreConsumer(Role):
    """backward_roles.ScoreConsumer."""

    def block(self) -> None:
        own, fault = self.own, self.p.fault
        self.matmuls(self.take(own.q), own.k)
        self.wait_groups(0)
        if fault is not Fault.FREE_NOT_AWAITED:
            self.wait_room(own.free)
        self.step(Op.PUT, self.of(own.ds), PROBABILITIES + self.n)
        self.step(Op.ARRIVE, self.of(own.ready), 2)
        self.release(own.q, self.n)
        self.matmuls(self.take(own.do))
        if fault is Fault.DO_RELEASED_EARLY:
            self.release(own.do, self.n)
        self.wait_groups(0)
        if fault is not Fault.DO_RELEASED_EARLY:
            self.release(own.do, self.n)

    def finish(self) -> None:
        self.step(Op.ARRIVE, self.own.keys_read, CONSUMERS)
        if self.p.fault is not Fault.NO_VALUES_BARRIER:
            self.step(Op.ARRIVE, self.own.values_read, 2)
            self.step(Op.WAIT, self.own.values_read, 0)
        self.step(Op.PUT, self.own.v, GRADIENT)


class GradientConsumer(Role):
    """backward_roles.GradientConsumer."""

    def block(self) -> None:
        own, fault = self.own, self.p.fault
        self.matmuls(self.take(own.do), own.v)
        self.wait_groups(0)
        if fault is not Fault.P_NOT_AWAITED:
            self.step(Op.ARRIVE, self.of(own.ready), 2)
            self.wait_round(own.ready)
        self.step(Op.READ, self.of(own.ds), PROBABILITIES + self.n)
        self.step(Op.PUT, self.of(own.ds), self.n)
        self.step(Op.ARRIVE, self.of(own.written), 1)
        for b in self.others:
            self.step(Op.READ, b.gone, 0)
            self.step(Op.LOAD, self.of(b.came), self.n)
        self.release(own.do, self.n)
        self.matmuls(self.take(own.q))
        if fault is Fault.Q_RELEASED_EARLY:
            self.release(own.q, self.n)
        self.wait_groups(0)
        if fault is not Fault.Q_RELEASED_EARLY:
            self.release(own.q, self.n)

    def finish(self) -> None:
        self.step(Op.ARRIVE, self.own.values_read, 2)
        if self.p.fault is not Fault.NO_KEYS_BARRIER:
            self.step(Op.ARRIVE, self.own.keys_read, CONSUMERS)
            self.step(Op.WAIT, self.own.keys_read, 0)
        self.step(Op.PUT, self.own.k, GRADIENT)


class DqConsumer(Role):
    """backward_roles.DqConsumer."""

    def block(self) -> None:
        own, fault, stages = self.own, self.p.fault, []
        if fault is not Fault.DS_NOT_AWAITED:
            self.wait_round(own.written)
        stages.append(self.of(own.ds))
        if self.others:
            if fault is not Fault.OTHERS_NOT_AWAITED:
                self.wait_round(own.arrived)
            stages.append(self.of(own.came))
        for stage in stages:
            self.step(Op.READ, stage, self.n)
        self.matmuls(*stages, own.k)
        self.wait_groups(0)
        for b in self.blocks:
            if b is own or fault is not Fault.FREED_AT_HOME:
                self.arrive_at(b, self.of(b.free), self.p.cluster)

    def finish(self) -> None:
        self.step(Op.ARRIVE, self.own.keys_read, CONSUMERS)


class End(Program):
    """A block's end: then its shared memory is another's."""

    def __init__(self, block: Block):
        super().__init__()
        self.step(Op.WAIT, block.ended, 0)
        self.step(Op.PUT, block.gone, 1)


def check(p: Protocol) -> int:
    """How many states there are. Raises Violation."""
    v = Variables()
    for rank in range(p.cluster):
        for name in ("producer", "scores", "gradients", "dQ", "end"):
            v.add(f"{name} of {rank}")
    blocks = [Block(v, p, rank) for rank in range(p.cluster)]
    programs: list[Program] = []
    for rank, block in enumerate(blocks):
        programs += [role(p, blocks, rank) for role in (Producer, ScoreConsumer, GradientConsumer, DqConsumer)]
        programs.append(End(block))
    loads = {at: full for block in blocks for at, full in block.loads().items()}
    sources = {}
    if p.cluster > 1:
        for block, other in (blocks, blocks[::-1]):
            sources |= dict(zip(block.came, other.ds, strict=True))
    machine = Machine(programs, v, loads, {}, sources)
    states, ends = search(machine.start, machine.fewer_successors, lambda state: is_over(machine, state, loads), machine.describe)
    for end in ends:
        for block in blocks:
            named = [*block.ready, block.keys_read, block.values_read]
            require(not any(end[at] >> 1 for at in named), "a barrier with an arrival at the end")
    return states


def is_over(machine: Machine, state: tuple[int, ...], loads: dict[int, int]) -> bool:
    """Every program, and every load."""
    ended = all(at == len(program) for at, program in zip(state, machine.programs, strict=False))
    return ended and all(state[at] >= 0 for at in loads)
