"""On which of a node's devices its shards lie, and what it does next on all of them: pure.

A plan says which node has which layers; which of its devices takes them the node says, as it alone
knows what is free there now. The largest shard first, each goes on the first device that has room,
one that has no other of its deployment if it can: of the layers of a node the planner cuts a part
for each device. Copies of the same layers, of which several replicas have one, lie on a device
each. What is somewhere stays there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from mesh.deployments.reconcile import BOUNDLESS, Decision, View, Wishes, reconcile, wishes_of
from mesh.deployments.wishes import Deployment, Wish
from mesh.types import LayerRange, ShardId

_NO_OTHER = "no other device here computes its format"

NeedMb = Callable[[Deployment, LayerRange, str], int | None]
"""What layers of a deployment take on a device, in MiB; None where it does not compute them in the
format that is wished."""


def seated(
    view: View,
    free_mb: Mapping[str, int | None],
    need_mb: NeedMb,
    asking_mb: Callable[[Wish], int],
) -> dict[ShardId, str]:
    """The device of everything that is held or wished for, but of copies for which there is none.

    `free_mb` is what is free on each, as `View` has it of one, None where nobody knows; of the
    first, what asking will take of it is for that. A shard that fits nowhere goes where most gets
    free once what is held and not wished for is gone.
    """
    wanted = wishes_of(view)
    seats = {held.shard: held.device for held in view.held}
    if len(free_mb) == 1:
        return dict.fromkeys((*wanted, *seats), *free_mb)
    left: dict[str, int] = {}
    surplus: Counter[str] = Counter()
    for device, mb in free_mb.items():
        here = [held for held in view.held if held.device == device]
        left[device] = BOUNDLESS if mb is None else mb - sum(h.mb for h in here if h.is_to_come)
        surplus[device] = sum(held.mb for held in here if held.shard not in wanted)
    wishes = {deployment.id: deployment.wish for deployment, _ in wanted.values()}
    left[next(iter(left))] -= sum(map(asking_mb, wishes.values()))
    new = [(shard, *wished) for shard, wished in wanted.items() if shard not in seats]
    for shard, deployment, layers in sorted(new, key=lambda row: -len(row[2])):
        copies = {seats[name] for name in _copies(wanted, deployment, layers) if name in seats}
        asked = {d: need_mb(deployment, layers, d) for d in free_mb if d not in copies}
        needs = {device: need for device, need in asked.items() if need is not None}
        if not needs:
            if not copies:  # its process says why
                seats[shard] = next(iter(free_mb))
            continue
        mine = deployment.shards_of(view.node, view.devices)
        same = {seats[name] for name in mine if name in seats}
        order = sorted(needs, key=same.__contains__)  # those without come first
        fitting = next((device for device in order if needs[device] <= left[device]), None)
        if fitting is not None:
            left[fitting] -= needs[fitting]
        roomiest = max(order, key=lambda d: left[d] + surplus[d] - needs[d])
        seats[shard] = roomiest if fitting is None else fitting
    return seats


def reconcile_devices(
    view: View,
    seats: Mapping[ShardId, str],
    free_mb: Mapping[str, int | None],
    need_mb: NeedMb,
) -> Decision:
    """The next steps on all devices of a node, of which each is reconciled by itself."""
    wanted = wishes_of(view).keys()
    elsewhere = {
        device: frozenset(name for name in wanted | seats.keys() if seats.get(name) != device)
        for device in free_mb
    }
    decisions = [
        reconcile(_part(view, elsewhere[device], device, free, need_mb))
        for device, free in free_mb.items()
    ]
    waiting = dict.fromkeys(wanted - seats.keys(), _NO_OTHER)
    for each in decisions:
        waiting |= each.waiting or {}
    return Decision(
        next((each.load for each in decisions if each.load is not None), None),
        tuple(fetch for each in decisions for fetch in each.fetches),
        tuple(drop for each in decisions for drop in each.drops),
        waiting,
        frozenset().union(*(each.lacking for each in decisions)),
        frozenset().union(*(each.unfetched for each in decisions)),
    )


def _part(
    view: View, others: frozenset[ShardId], device: str, free_mb: int | None, need_mb: NeedMb
) -> View:
    """What concerns one device."""
    return replace(
        view,
        held=[held for held in view.held if held.device == device],
        elsewhere=[held for held in view.held if held.device != device],
        others=others,
        free_mb=free_mb,
        need_mb=partial(_on, need_mb, device),
    )


def _copies(wanted: Wishes, deployment: Deployment, layers: LayerRange) -> Iterator[ShardId]:
    """What the shards of these layers are called."""
    for shard, (each, its) in wanted.items():
        if each.id == deployment.id and its == layers:
            yield shard


def _on(need_mb: NeedMb, device: str, deployment: Deployment, layers: LayerRange) -> int:
    return need_mb(deployment, layers, device) or 0
