"""The verbs of deployments: deploy, scale, evict, and what has become of each.

The HTTP API's `mesh.api.services.DeploymentControl`; JSON-able values in and out. A verb signs a
wish and the plan for it; what the machines do about that is `mesh.deployments.actor`'s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mesh.deployments.formats import is_as_wished
from mesh.deployments.listing import DeploymentRows, SeenDeployment
from mesh.deployments.placement import make_plan, require_pins
from mesh.deployments.reading import ReadingModels
from mesh.deployments.reconcile import ServedShard
from mesh.deployments.room import Change, Standing, absences, room_of_others, to_rest
from mesh.deployments.waking import Stay
from mesh.deployments.weights import Checkpoint, WeightsSource
from mesh.deployments.wishes import Deployment, Plan, Span, Wish, live, merged
from mesh.deployments.world import World
from mesh.errors import BadRequest, Forbidden, MeshError, NotFound
from mesh.identity.naming import called, nodes_meant, told_apart
from mesh.processes.tasks import end, spawn
from mesh.types import LayerRange, ModelId, NodeId

logger = logging.getLogger(__name__)
MAX_PLANS = 5
"""For one order: as many orders for a deployment at once all hold."""
HOLD_LOOKS, HOLD_LOOK_S = 20, 0.25
"""For how long others' wishes of the same moment may be on their way."""


class Deploying:
    """The verbs."""

    def __init__(
        self,
        house: World,
        weights: WeightsSource,
        rows: DeploymentRows,
        call_for: Callable[[str], None],
        up_s: Callable[[str], float],
        stay: Callable[[str], Stay] = lambda name: Stay(),
    ) -> None:
        """`call_for` has this node ask a deployment, whatever is placed here; `up_s` says for how
        long one has been up, `stay` until when it stays."""
        self._house = house
        self._weights = weights
        self._rows = rows
        self._reading = ReadingModels(weights, rows, house.node)
        self._call_for = call_for
        self._up_s = up_s
        self._stay = stay
        self._signing = asyncio.Lock()
        self._held: set[asyncio.Task[None]] = set()

    def view(self) -> list[dict[str, Any]]:
        """A row for each deployment that was not evicted or is still to be wished for, by model."""
        wished = live(self._house.deployments())
        rows = [self._row(each) for each in wished]
        names = {each.id for each in wished}
        rows += [row for row in self._reading.view() if row["deployment"] not in names]
        return sorted(rows, key=lambda row: (row["model_id"], row["deployment"]))

    def seen(self, model: ModelId) -> list[SeenDeployment]:
        """What is seen of each deployment of a model, as in the `view`."""
        wished = live(self._house.deployments())
        names = {each.id for each in wished}
        found = [self._rows.seen(each) for each in wished if each.wish.model_id == model]
        read = self._reading.seen(model)
        return found + [each for each in read if each.deployment.id not in names]

    async def deploy(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Wish for a model, or change the wish for one that is deployed. `given` are the `model`,
        and what is to be otherwise of its wish: fields of a `Wish`, with `nodes` by names or ids,
        and `layers`, which are pins, ``NODE=LO-HI``; one replica where it had none. Its
        row, with the `gaps` that making the change will open.

        A model whose hash nobody knows is read first: that goes on after the answer, and is in the
        `view`. Raises ModelNotFound, NoRoute, BadRequest naming the field, UntrustedPeer, Busy, and
        what signing raises.
        """
        model, order = given["model"], {key: given[key] for key in given if key != "model"}
        self._house.require_operator()
        known = self._find(model)
        if known is not None:
            return await self._deploy(order, known.wish, known)
        found = await self._weights.find(model)
        if found.weights_sha256:
            return await self._deploy_found(order, secrets.token_hex(8), found)
        known = self._find(found.model_id)  # the hub calls it otherwise, and it is up as that
        if known is not None:
            return await self._deploy(order, known.wish, known)
        wish = self._ordered(_new_wish(secrets.token_hex(8), found), order)
        _, plan = await self._planned(wish, None)  # what has no room is refused before it is read

        async def then(read: Checkpoint) -> None:
            await self._deploy_found(order, name, read)

        name = self._reading.begin(wish, plan.spans_of(self._house.node), then)
        row = next(row for row in self._reading.view() if row["deployment"] == name)
        return {**row, "gaps": []}

    async def wake(self, model: str, *, may_wake: bool) -> bool:
        """Have a model up whose deployments all rest, or are of no replica; whether that had to be
        wished for.

        Raises Forbidden unless who asks `may_wake`, and as `deploy`.
        """
        found = [each for each in live(self._house.deployments()) if each.wish.model_id == model]
        if not found or any(each.is_wanted for each in found):
            return False
        first = next((each for each in found if each.wish.replicas), found[0])
        if not may_wake:
            raise Forbidden(
                f"{model} is COLD, and who asks may not wake it.",
                fix="Use a trusted key (`hearthnet keys create --trusted`), or `hearthnet run`.",
                param="model",
            )
        await self.deploy({"model": first.id})
        return True

    async def scale(self, model: str, replicas: int) -> dict[str, Any]:
        """Have so many replicas of a deployment, more or fewer. Raises NotFound and as `deploy`."""
        self._house.require_operator()
        deployment = self._require(model)

        def scaled(wish: Wish) -> Wish:
            return replace(wish, replicas=replicas, resting=False)

        return await self._wish(scaled, deployment.wish, deployment)

    async def evict(self, model: str) -> list[dict[str, Any]]:
        """End a deployment, or all of a model: ``{"deployment", "model_id", "evicted"}`` each.

        Raises NotFound and UntrustedPeer.
        """
        self._house.require_operator()
        wishes = {
            each.id: each.wish
            for standing in self._named(model)
            for each in (standing, *merged(self._house.deployments(), standing.id))
        }
        ended = self._reading.end(model)
        # One that has just been read may be written to the log at this moment.
        wishes |= {wish.deployment: wish for wish, may_be_signed in ended if may_be_signed}
        if not wishes and not ended:
            raise self._not_found(model)
        for wish in wishes.values():
            await self._house.publish_wish(replace(wish, evicted=True))
        wishes |= {wish.deployment: wish for wish, _ in ended}
        return [
            {"deployment": name, "model_id": wish.model_id, "evicted": True}
            for name, wish in wishes.items()
        ]

    def room_of_others(
        self, model_id: ModelId, weights_sha256: str, *, dedicated: bool
    ) -> Mapping[NodeId, int]:
        """MiB that would get free on each machine if all rested that may for this model."""
        found = Checkpoint(model_id, weights_sha256, 0, 0)
        known = self._of(model_id, weights_sha256)
        wish = _new_wish("", found) if known is None else known.wish
        wish = replace(wish, dedicated=dedicated)
        return room_of_others(wish, self._others(wish).values(), self._house.need_of)

    def require(self, model: str) -> dict[str, Any]:
        """The row of one deployment, by its id or model. Raises NotFound."""
        return self._row(self._require(model))

    async def close(self) -> None:
        """Read no model any more."""
        await end(self._held)
        await self._reading.close()

    # Private

    def _row(self, deployment: Deployment) -> dict[str, Any]:
        stay = self._stay(deployment.id)
        at = None if stay.rests_at is None else stay.rests_at.isoformat(timespec="seconds")
        row = self._rows.row(self._rows.seen(deployment))
        return {**row, "in_use": stay.in_use, "rests_at": at}

    async def _deploy_found(
        self, order: Mapping[str, Any], name: str, found: Checkpoint
    ) -> dict[str, Any]:
        """Wish for it under a new name, or change the wish that there is for it."""
        known = self._of(found.model_id, found.weights_sha256)
        return await self._deploy(
            order, _new_wish(name, found) if known is None else known.wish, known
        )

    async def _deploy(
        self, order: Mapping[str, Any], wish: Wish, before: Deployment | None
    ) -> dict[str, Any]:
        row = await self._wish(lambda known: self._ordered(known, order), wish, before)
        self._call_for(row["deployment"])
        return row

    async def _planned(self, wish: Wish, plan_before: Plan | None) -> tuple[Wish, Plan]:
        """A plan for it, and the wish in the format that was planned with. Raises NoRoute."""
        need, others = self._house.need_of, self._others(wish)
        laid = await self._house.laid_out(wish, plan_before, {})
        freed_mb = room_of_others(wish, others.values(), need)
        if laid.refusal is not None and freed_mb:
            laid = await self._house.laid_out(wish, plan_before, freed_mb)
        if laid.quant:  # machines of several kinds would each take their own, and share no route
            wish = replace(wish, quant=laid.quant)
        machines = self._house.machines()
        require_pins(wish, machines, called(self._house.names().items()))
        return wish, make_plan(wish, "0" * 64, machines, plan_before, asked=True, laid=laid)

    def _others(self, wish: Wish) -> dict[str, Standing]:
        """The other deployments that are wanted."""
        return {
            each.id: Standing(each, self._up_s(each.id))
            for each in live(self._house.deployments())
            if each.is_wanted and each.id != wish.deployment
        }

    async def _wish(
        self, changed: Callable[[Wish], Wish], wish: Wish, before: Deployment | None
    ) -> dict[str, Any]:
        """Sign what a wish is `changed` to. Plan first: what cannot be met is not signed; and what
        others have wished for meanwhile is changed instead, or theirs would be taken back."""
        plans = 0
        while True:
            asked, plan = await self._planned(changed(wish), before.plan if before else None)
            plans += 1
            async with self._signing:
                now = self._of(wish.model_id, wish.weights_sha256)
                is_known = before is not None and now is not None and now.event == before.event
                if is_known or now is None or plans == MAX_PLANS:
                    signed, gaps = await self._signed(asked, plan, before)
                    break
            wish, before = now.wish, now
        spawn(self._hold(changed, signed), f"hold {signed.id}", among=self._held)
        return {**self.require(signed.id), "gaps": gaps}

    async def _hold(self, changed: Callable[[Wish], Wish], signed: Deployment) -> None:
        """Order again what another node took back that wished at the same moment, and had not heard
        of this."""
        for _ in range(HOLD_LOOKS):
            await asyncio.sleep(HOLD_LOOK_S)
            now = self._of(signed.wish.model_id, signed.wish.weights_sha256)
            if now is None or now.lamport > signed.lamport:
                return
            if now.event != signed.event and now.id == signed.id:
                try:
                    await self._wish(changed, now.wish, now)
                except MeshError as error:
                    logger.warning("deployment=%s not changed as ordered: %s", now.id, error)
                return

    async def _signed(
        self, wish: Wish, plan: Plan, before: Deployment | None
    ) -> tuple[Deployment, list[dict[str, str]]]:
        """Sign it with its plan; the gaps that this opens. Who makes room rests before."""
        plan_before = None if before is None else before.plan
        others = self._others(wish)
        need, machines = self._house.need_of, self._house.machines()
        change = self._change(wish, plan, before)
        going = to_rest(change, others.values(), machines, need)
        away = absences(change, others.values(), going, machines, need)
        for name in going:
            standing = self._house.deployments()[name]  # others may have wished since the plan
            await self._house.publish_wish(replace(standing.wish, resting=True))
        if before is None or wish != before.wish:
            signed = await self._house.publish_wish(wish)
        else:
            signed = before
        if plan_before is None or plan_before.replicas != plan.replicas or not signed.is_planned:
            await self._house.publish_plan(replace(plan, wish=signed.event))
        gaps = [
            {"node": each.machine, "drops": str(each.drops), "loads": str(each.loads)}
            for each in away
        ]
        return signed, gaps

    def _change(self, wish: Wish, plan: Plan, before: Deployment | None) -> Change:
        """What a wish changes of what is up."""
        if before is None or before.plan is None or not before.is_wanted:
            return Change(wish, plan)
        there = [*self._house.served(), *self._house.serves()]
        is_anyhow = wish.quant == "auto" != before.wish.quant  # what that will be nobody knows
        anew = {
            span
            for span in plan.spans & before.plan.spans
            for each in there
            if each == ServedShard(span.node, wish.model_id, wish.weights_sha256, span.layers)
            and (is_anyhow or not is_as_wished(each.loaded, wish))
        }
        return Change(wish, plan, before, frozenset(anew))

    def _ordered(self, wish: Wish, order: Mapping[str, Any]) -> Wish:
        """The wish with what is ordered in it."""
        said = {"replicas": max(1, wish.replicas), **order}
        if "nodes" in said:
            said["nodes"] = tuple(self._node(each) for each in said["nodes"])
        if "layers" in said:
            said["pins"] = tuple(self._pin(wish, each) for each in said.pop("layers"))
        changed = replace(wish, resting=False, **said)
        taken: set[int] = set()
        for pin in changed.pins:
            layers = set(range(pin.layers.start, pin.layers.stop))
            if layers & taken:
                raise _bad_layers(f"{pin.layers} overlaps another pin")
            taken |= layers
        return changed

    def _pin(self, wish: Wish, text: str) -> Span:
        node, _, layers = text.rpartition("=")
        try:
            span = Span(self._node(node), LayerRange.parse(layers))
        except ValueError as error:
            raise _bad_layers(str(error)) from None
        if not wish.whole.covers(span.layers):
            raise _bad_layers(f"{wish.model_id} has layers {wish.whole}, not {span.layers}")
        return span

    def _node(self, who: str) -> NodeId:
        """The member that is meant, see `nodes_meant`."""
        trusted = self._house.trusted()
        names = {node: name for node, name in self._house.names().items() if node in trusted}
        found = nodes_meant(who, names.items())
        if len(found) != 1:
            raise BadRequest(
                f"{'no' if not found else 'more than one'} member that may hold layers is called"
                f" {who!r}.",
                fix=f"Name one of: {told_apart(names.items())}.",
                param="nodes",
            )
        return found[0]

    def _of(self, model_id: str, weights: str) -> Deployment | None:
        found = [
            each
            for each in live(self._house.deployments())
            if (each.wish.model_id, each.wish.weights_sha256) == (model_id, weights)
        ]
        return found[0] if found else None

    def _named(self, model: str) -> list[Deployment]:
        """Those that stand and are called so: by their model, their id, or that of one that is
        merged into them."""
        known = self._house.deployments()
        into = known[model].merged_into if model in known else ""
        return [each for each in live(known) if {each.id, each.wish.model_id} & {model, into}]

    def _find(self, model: str) -> Deployment | None:
        found = self._named(model)
        if len(found) > 1:
            raise BadRequest(
                f"{model} is deployed {len(found)} times.",
                fix=f"Name one of: {', '.join(each.id for each in found)}.",
                param="model",
            )
        return found[0] if found else None

    def _require(self, model: str) -> Deployment:
        found = self._find(model)
        if found is None:
            raise self._not_found(model)
        return found

    def _not_found(self, model: str) -> NotFound:
        known = sorted({each.wish.model_id for each in live(self._house.deployments())})
        return NotFound(
            f"{model!r} is not deployed; {', '.join(known) or 'nothing'} is.",
            fix="See `hearthnet status`; `hearthnet deploy MODEL` brings one up.",
        )


def _new_wish(name: str, found: Checkpoint) -> Wish:
    if not found.model_id.isprintable():  # which nobody would take for a wish
        raise BadRequest(
            f"{found.model_id!r} is no name that can be shown.",
            fix="Give it another: PATH=NAME.",
            param="model",
        )
    return Wish(name, found.model_id, found.weights_sha256, found.total_layers, found.layers_mb)


def _bad_layers(why: str) -> BadRequest:
    return BadRequest(f"layers: {why}.", fix="Give NODE=LO-HI within the model.", param="layers")
