"""No order of steps of the backward's roles ends in deadlock or overwrites what is still read; and the search finds each fault put in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.backward_configurations import BACKWARD
from flash3.backends.hopper.backward_tiles import Order, Split

from .backward_protocol import Fault, Protocol, check
from .machine import Violation

KEYS, SENT = Protocol(blocks=3), Protocol(blocks=3, sender=True)
ROLES = Protocol(blocks=3, split=Split.ROLES)
ROLES_SENT = Protocol(blocks=3, split=Split.ROLES, sender=True, q_stages=1, do_stages=1)


def protocols() -> set[Protocol]:
    """What differs among the configurations, with more blocks than a ring holds."""
    return {
        Protocol(
            blocks=t.q_stages + 1,
            q_stages=t.q_stages,
            do_stages=t.do_stages,
            split=t.split,
            sender=t.has_sender,
            in_turn=t.order is Order.IN_TURN,
        )
        for _, t in BACKWARD.values()
    }


@pytest.mark.parametrize("p", sorted(protocols(), key=str), ids=str)
def test_configurations(p: Protocol) -> None:
    check(p)
    check(replace(p, blocks=0))


IN_TURN = Protocol(blocks=4, in_turn=True)
FAULTS = [
    (Fault.Q_RELEASED_EARLY, replace(KEYS, q_stages=1), "overwrites"),
    (Fault.Q_RELEASED_EARLY, replace(ROLES, q_stages=1), "overwrites"),
    (Fault.DO_RELEASED_EARLY, replace(KEYS, do_stages=1), "overwrites"),
    (Fault.DO_RELEASED_EARLY, replace(ROLES, do_stages=1), "overwrites"),
    (Fault.NO_SCORE_BARRIER, KEYS, "dS"),
    (Fault.ONE_DS_BUFFER, KEYS, "dS0 of ."),
    (Fault.NO_KEYS_BARRIER, KEYS, "K0: -7 overwrites 0 under a reader"),
    (Fault.NO_KEYS_BARRIER, ROLES, "overwrites 0 under a reader"),
    (Fault.NO_SLOT_BARRIER, SENT, "dQ half"),
    (Fault.SENT_UNREAD, SENT, "dQ half"),
    (Fault.P_NOT_AWAITED, ROLES, "P holds"),
    (Fault.NO_READ_BARRIER, IN_TURN, "dS"),
    (Fault.NO_LAST_TURN, IN_TURN, "deadlock"),
    (Fault.ARRIVAL_TOO_MANY, replace(KEYS, q_stages=1), "deadlock"),
]


@pytest.mark.parametrize(("fault", "p", "found"), FAULTS, ids=[f"{fault.name}-{i}" for i, (fault, _, _) in enumerate(FAULTS)])
def test_faults_are_found(fault: Fault, p: Protocol, found: str) -> None:
    with pytest.raises(Violation, match=found):
        check(replace(p, fault=fault))


def test_every_fault_is_tried_on_a_sound_protocol() -> None:
    assert {fault for fault, _, _ in FAULTS} == set(Fault)
    for p in {p for _, p, _ in FAULTS} | {ROLES_SENT}:
        check(p)
