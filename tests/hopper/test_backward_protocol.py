"""No order of steps of the backward's roles ends in deadlock or overwrites what is still read; and the search finds each fault put in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.backward_configurations import BACKWARD
from flash3.backends.hopper.backward_tiles import Order, Split, starts_early

from . import roles_protocol
from .backward_protocol import Fault, Protocol, check
from .machine import Violation
from .roles_protocol import Fault as RolesFault
from .roles_protocol import Protocol as RolesProtocol

KEYS, SENT = Protocol(blocks=3), Protocol(blocks=3, sender=True)


def protocols() -> set[Protocol]:
    """What differs among the configurations whose consumers share keys, with more blocks than a ring holds."""
    return {
        Protocol(
            blocks=t.q_stages + 1,
            q_stages=t.q_stages,
            do_stages=t.do_stages,
            sender=t.has_sender,
            in_turn=t.order is Order.IN_TURN,
            early=starts_early(s, t),
        )
        for s, t in BACKWARD.values()
        if t.split is Split.KEYS
    }


def roles_protocols() -> set[RolesProtocol]:
    """The same of those with roles; two blocks leave so many orders that fewer must do."""
    return {
        RolesProtocol(
            blocks=t.q_stages + 1 if t.cluster == 1 else t.ds_stages + 1,
            q_stages=t.q_stages,
            do_stages=t.do_stages,
            ds_stages=t.ds_stages,
            cluster=t.cluster,
        )
        for _, t in BACKWARD.values()
        if t.split is Split.ROLES
    }


@pytest.mark.parametrize("p", sorted(protocols(), key=str), ids=str)
def test_configurations(p: Protocol) -> None:
    check(p)
    check(replace(p, blocks=0))


@pytest.mark.parametrize("p", sorted(roles_protocols(), key=str), ids=str)
def test_configurations_with_roles(p: RolesProtocol) -> None:
    roles_protocol.check(p)
    roles_protocol.check(replace(p, blocks=0))


IN_TURN = Protocol(blocks=4, in_turn=True)
FAULTS = [
    (Fault.Q_RELEASED_EARLY, replace(KEYS, q_stages=1), "overwrites"),
    (Fault.DO_RELEASED_EARLY, replace(KEYS, do_stages=1), "overwrites"),
    (Fault.NO_SCORE_BARRIER, KEYS, "dS"),
    (Fault.ONE_DS_BUFFER, KEYS, "dS0 of ."),
    (Fault.NO_KEYS_BARRIER, KEYS, "K0: -7 overwrites 0 under a reader"),
    (Fault.NO_SLOT_BARRIER, SENT, "dQ half"),
    (Fault.SENT_UNREAD, SENT, "dQ half"),
    (Fault.NO_READ_BARRIER, IN_TURN, "dS"),
    (Fault.NO_LAST_TURN, IN_TURN, "deadlock"),
    (Fault.KEYS_NOT_COUNTED, replace(KEYS, early=True), "K0 holds -1 and not 0"),
    (Fault.ARRIVAL_TOO_MANY, replace(KEYS, q_stages=1), "deadlock"),
]


@pytest.mark.parametrize(("fault", "p", "found"), FAULTS, ids=[f"{fault.name}-{i}" for i, (fault, _, _) in enumerate(FAULTS)])
def test_faults_are_found(fault: Fault, p: Protocol, found: str) -> None:
    with pytest.raises(Violation, match=found):
        check(replace(p, fault=fault))


def test_every_fault_is_tried_on_a_sound_protocol() -> None:
    assert {fault for fault, _, _ in FAULTS} == set(Fault)
    for p in {p for _, p, _ in FAULTS}:
        check(p)


ALONE = RolesProtocol(blocks=3)
PAIR = RolesProtocol(blocks=2, ds_stages=1, cluster=2)
ROLES_FAULTS = [
    (RolesFault.Q_RELEASED_EARLY, replace(ALONE, q_stages=1), "Q of 0 0: 1 overwrites 0 under a reader"),
    (RolesFault.DO_RELEASED_EARLY, replace(ALONE, do_stages=1), "dO of 0 0: 1 overwrites 0 under a reader"),
    (RolesFault.P_NOT_AWAITED, ALONE, "dS0 of 0 holds"),
    (RolesFault.DS_NOT_AWAITED, ALONE, "dS0 of 0 holds"),
    (RolesFault.OTHERS_NOT_AWAITED, PAIR, "other dS0 of . holds"),
    (RolesFault.FREE_NOT_AWAITED, ALONE, "dS0 of 0: 1002 overwrites 0 under a reader"),
    (RolesFault.FREED_AT_HOME, PAIR, "deadlock"),
    (RolesFault.NO_KEYS_BARRIER, ALONE, "K of 0: -7 overwrites 0 under a reader"),
    (RolesFault.NO_VALUES_BARRIER, ALONE, "V of 0: -7 overwrites 0 under a reader"),
    (RolesFault.NO_LAST_MEETING, PAIR, "gone holds 1"),
]


@pytest.mark.parametrize(("fault", "p", "found"), ROLES_FAULTS, ids=[fault.name for fault, _, _ in ROLES_FAULTS])
def test_faults_with_roles_are_found(fault: RolesFault, p: RolesProtocol, found: str) -> None:
    with pytest.raises(Violation, match=found):
        roles_protocol.check(replace(p, fault=fault))


def test_every_fault_with_roles_is_tried_on_a_sound_protocol() -> None:
    assert {fault for fault, _, _ in ROLES_FAULTS} == set(RolesFault)
    for p in {p for _, p, _ in ROLES_FAULTS}:
        roles_protocol.check(p)
