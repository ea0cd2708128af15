"""Which backward tiles a tuner may try: every combination that the budget lets through, in pure Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace

from . import backward_budget
from .backward_tiles import CONSUMERS, KEYS_PER_CONSUMER, BackwardSpec, BackwardTiles, DqPath, Order, Split

STAGES = (2, 1, 3)


def legal(spec: BackwardSpec, own: BackwardTiles) -> list[BackwardTiles]:
    """Legal tiles, none twice: `own` first, then the others by the number of fields that differ from it."""
    found = dict.fromkeys(tiles for tiles in _combinations(spec) if not backward_budget.problems(spec, tiles))
    found.pop(own, None)
    return [own, *sorted(found, key=lambda tiles: sum(getattr(tiles, f.name) != getattr(own, f.name) for f in fields(BackwardTiles)))]


def _combinations(spec: BackwardSpec) -> Iterator[BackwardTiles]:
    paths = (DqPath.ORDERED,) if spec.deterministic else (DqPath.REGISTERS, DqPath.SHARED)
    for split, path, order in itertools.product(Split, paths, Order):
        keys = KEYS_PER_CONSUMER * (1 if split is Split.ROLES else CONSUMERS)
        frame = BackwardTiles(q=KEYS_PER_CONSUMER, kv=keys, split=split, dq_path=path, order=order)
        sizes = itertools.product((64, 128), STAGES, STAGES, (2, 1), (1, 2), (1, 2))
        for q, q_stages, do_stages, ds_stages, kv_stages, cluster in sizes:
            yield replace(frame, q=q, q_stages=q_stages, do_stages=do_stages, ds_stages=ds_stages, kv_stages=kv_stages, cluster=cluster)
