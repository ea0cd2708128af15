"""No order of steps of the forward's roles ends in deadlock or overwrites what is still read; and the search finds each fault put in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.configurations import CONFIGURATIONS
from flash3.backends.hopper.keyblocks import consumers_part
from flash3.backends.hopper.tiles import Overlap, QuerySource, Turns
from flash3.mask import MaskKind

from .machine import State, Violation, require, search, with_changes
from .protocol import Fault, Protocol, check

Way = tuple[int, int, int]
SHARED, IN_ORDER, PING_PONG = QuerySource.SHARED, Overlap.IN_ORDER, Turns.PING_PONG


def together(consumers: int, blocks: int) -> tuple[Way, ...]:
    """A tile whose consumers all visit all blocks."""
    return ((0, blocks, 0),) * consumers


def stairs(consumers: int, blocks: int, window: bool = False) -> tuple[Way, ...]:
    """A tile under a causal mask or a window whose consumers walk their own blocks."""
    right = [min(consumers - 1 - i, blocks - 1) for i in range(consumers)]
    left = [min(i, blocks - 1 - right[i]) if window else 0 for i in range(consumers)]
    return tuple((right[i], blocks - right[i] - left[i], left[i]) for i in range(consumers))


def protocols(most_stages: int) -> dict[str, Protocol]:
    """What differs among the configurations, each with one tile of more blocks than its ring holds. A fourth consumer is left out, since
    it only repeats the third."""
    found = {}
    for spec, tiles in CONFIGURATIONS.values():
        consumers, stages = min(tiles.consumers, 3), min(tiles.stages, most_stages)
        parts, o_parts = min(tiles.parts, 2), min(spec.v_width // tiles.o_columns, 2)
        way = stairs if consumers_part(spec, tiles) else together
        words = [f"{consumers} consumers", f"{stages} stages", tiles.query_source.value, tiles.overlap.value, tiles.turns.value]
        found[", ".join([*words, f"{parts} parts", f"O in {o_parts}", way.__name__])] = Protocol(
            walks=(way(consumers, stages + 1),),
            stages=stages,
            query_source=tiles.query_source,
            overlap=tiles.overlap,
            turns=tiles.turns,
            parts=parts,
            o_parts=o_parts,
            masked=int(spec.mask_kind is not MaskKind.FULL),
        )
    return found


REDUCED, DEEP = protocols(2), protocols(4)
TWO = Protocol(walks=(together(2, 2),) * 2, stages=2)
CAUSAL = replace(TWO, walks=(stairs(2, 2), stairs(2, 2)))


@pytest.mark.parametrize("p", REDUCED.values(), ids=REDUCED)
def test_configurations(p: Protocol) -> None:
    """With at most two stages, and for two tiles of three consumers with one."""
    check(p)
    tile = stairs(p.consumers, 2) if p.walks[0][0] != p.walks[0][1] else together(p.consumers, 2)
    check(replace(p, walks=(tile, tile), stages=p.stages if p.consumers == 2 else 1))


@pytest.mark.slow
@pytest.mark.parametrize("p", DEEP.values(), ids=DEEP)
def test_configurations_with_all_their_stages(p: Protocol) -> None:
    check(p)


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("query_source", QuerySource)
@pytest.mark.parametrize("turns", Turns)
@pytest.mark.parametrize("stages", [1, 2])
def test_two_consumers(stages: int, turns: Turns, query_source: QuerySource, overlap: Overlap) -> None:
    p = Protocol(walks=(together(2, 1),), stages=stages, turns=turns, query_source=query_source, overlap=overlap)
    for blocks in ([1], [3], [1, 1], [3, 1], [2, 3]):
        check(replace(p, walks=tuple(together(2, b) for b in blocks)))


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("query_source", QuerySource)
@pytest.mark.parametrize("stages", [1, 2])
def test_own_walks(stages: int, query_source: QuerySource, overlap: Overlap) -> None:
    p = Protocol(walks=(together(2, 1),), stages=stages, query_source=query_source, overlap=overlap)
    for first, second in ((stairs(2, 2), stairs(2, 3)), (stairs(2, 3, window=True), stairs(2, 2, window=True))):
        check(replace(p, walks=(first, second)))


@pytest.mark.parametrize("turns", Turns)
def test_three_consumers(turns: Turns) -> None:
    check(Protocol(walks=(together(3, 1), together(3, 2)), stages=1, turns=turns))


@pytest.mark.slow
@pytest.mark.parametrize("turns", Turns)
def test_three_consumers_two_stages(turns: Turns) -> None:
    check(Protocol(walks=(together(3, 2), together(3, 2)), stages=2, turns=turns))


def test_warps_of_a_consumer() -> None:
    """Which need not go in step: the barriers around O are theirs, and each empties stages for itself."""
    check(Protocol(walks=(together(1, 2), together(1, 1)), stages=1, o_parts=2, warps=2))
    check(Protocol(walks=(together(2, 2),), stages=1, turns=PING_PONG, warps=2))


@pytest.mark.parametrize(
    "p",
    [
        Protocol(walks=(together(2, 2),), stages=1, turns=PING_PONG),
        Protocol(walks=(stairs(2, 2), stairs(2, 1)), stages=1),
        Protocol(walks=(together(1, 1), together(1, 2)), stages=2, query_source=SHARED, o_parts=2),
        Protocol(walks=(together(2, 2),), stages=2, overlap=IN_ORDER, turns=PING_PONG),
    ],
)
def test_fewer_orders_suffice(p: Protocol) -> None:
    """Taking waits alone leaves out states, not faults."""
    assert check(p) < check(p, every_order=True)


FAULTS = [
    (Fault.Q_RELEASED_AFTER_LDMATRIX, TWO, "overwrites 0 under a reader"),
    (Fault.Q_RELEASED_AFTER_LDMATRIX, CAUSAL, "overwrites 0 under a reader"),
    (Fault.SHARED_Q_RELEASED_EARLY, replace(TWO, query_source=SHARED), "Q0: "),
    (Fault.K_RELEASED_EARLY, replace(TWO, stages=1), "K0: 1 overwrites 0 under a reader"),
    (Fault.K_RELEASED_EARLY, replace(TWO, stages=1, parts=2, turns=PING_PONG), "K0: 1 overwrites 0 under a reader"),
    (Fault.K_NOT_KEPT, replace(TWO, walks=(together(2, 3),), stages=1), "K0: 2 overwrites 1 under a reader|K0 holds"),
    (Fault.K_NOT_KEPT, replace(TWO, walks=(together(2, 3),), stages=1, overlap=IN_ORDER), "K0: 2 overwrites 1 under a reader|K0 holds"),
    (Fault.V_RELEASED_EARLY, replace(TWO, stages=1), "V0: 1 overwrites 0 under a reader"),
    (Fault.V_RELEASED_EARLY, replace(TWO, stages=1, overlap=IN_ORDER), "V0: 1 overwrites 0 under a reader"),
    (Fault.V_NOT_AWAITED, TWO, "V0 holds"),
    (Fault.ARRIVAL_TOO_FEW, replace(TWO, stages=1), "K0: 1 overwrites 0 under a reader|K0 holds"),
    (Fault.ARRIVAL_TOO_MANY, replace(TWO, stages=1), "deadlock"),
    (Fault.BLOCK_KEPT, replace(CAUSAL, stages=1), "deadlock"),
    (Fault.TURN_KEPT, replace(TWO, turns=PING_PONG), "deadlock"),
    (Fault.TURN_KEPT, replace(TWO, turns=PING_PONG, overlap=IN_ORDER), "deadlock"),
    (Fault.NO_FIRST_TURN, replace(TWO, turns=PING_PONG), "deadlock"),
    (Fault.O_REUSED, TWO, "O .: written while TMA reads it"),
    (Fault.O_REUSED, replace(TWO, walks=TWO.walks[:1], o_parts=2), "O .: written while TMA reads it"),
    (Fault.O_WRITTEN_EARLY, Protocol(walks=(together(1, 1),), stages=1, o_parts=2, warps=2), "O 0: "),
    (Fault.O_SENT_EARLY, Protocol(walks=(together(1, 1),), stages=1, warps=2), "O 0: sent when 1 of 2"),
    (Fault.O_LEFT, TWO, "O .: TMA reads it when its consumer leaves"),
    (Fault.BOX_UNGUARDED, replace(TWO, walks=(together(2, 1),) * 2, slots=1), "box0"),
    (Fault.NO_TAIL, TWO, "stages in use when their producer leaves"),
]


@pytest.mark.parametrize(("fault", "p", "found"), FAULTS, ids=[f"{fault.name}-{i}" for i, (fault, _, _) in enumerate(FAULTS)])
def test_faults_are_found(fault: Fault, p: Protocol, found: str) -> None:
    with pytest.raises(Violation, match=found):
        check(replace(p, fault=fault))


def test_every_fault_is_tried_on_a_sound_protocol() -> None:
    assert {fault for fault, _, _ in FAULTS} == set(Fault)
    for p in {p for _, p, _ in FAULTS}:
        check(p)


def test_turns_need_one_walk() -> None:
    """Why consumers walk their own blocks only without turns: whoever visits fewer leaves the cycle waiting."""
    with pytest.raises(Violation, match="deadlock"):
        check(replace(CAUSAL, turns=PING_PONG))


def test_q_guards_the_box() -> None:
    """With two slots the box cannot be overrun even unguarded: tile t + 2 is sent after Q of tile t + 1 was loaded, so after every consumer
    gave back Q of tile t, and before that it had read of tile t."""
    check(Protocol(walks=(together(2, 1),) * 4, stages=1, fault=Fault.BOX_UNGUARDED))


@pytest.mark.parametrize("grid", [1, 2, 3])
@pytest.mark.parametrize("num_tiles", range(6))
def test_tickets(num_tiles: int, grid: int) -> None:
    """Also a grid larger than the tiles, which ragged queries may have."""
    check_tickets(num_tiles, grid)


def check_tickets(num_tiles: int, grid: int) -> int:
    """schedule.Dispatcher of every block, as far as the counter is concerned. State: counter; tickets so far; for each tile, how often it
    was run; for each block, the ticket in its hand or else one of the three below."""
    outside, at_tile, gone = -1, -2, -3

    def go_on(state: State, at: int, tile: int) -> State:
        if tile >= num_tiles:
            return with_changes(state, (at, gone))
        return with_changes(state, (at, at_tile), (2 + tile, state[2 + tile] + 1))

    def successors(state: State) -> Iterator[State]:
        for block in range(grid):
            at = 2 + num_tiles + block
            ticket = state[at]
            if ticket == outside:
                yield go_on(state, at, block)
            elif ticket == at_tile:
                yield with_changes(state, (at, state[0]), (0, state[0] + 1), (1, state[1] + 1))
            elif ticket != gone:
                new = go_on(state, at, ticket + grid)
                yield with_changes(new, (0, 0)) if new[at] == gone and ticket == num_tiles - 1 else new

    def is_over(state: State) -> bool:
        require(state[: 2 + num_tiles] == (0, num_tiles) + (1,) * num_tiles, f"counter, tickets, runs of each tile: {state}")
        return True

    return search((0, 0) + (0,) * num_tiles + (outside,) * grid, successors, is_over)[0]
