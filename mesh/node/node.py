"""The composition root: builds a node out of its parts, runs it, takes it down in order.

The only file that knows all parts. It decides nothing but who is given what.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mesh.accounts import allowances
from mesh.accounts.ledger import ResourceLedger
from mesh.api.app import create_app
from mesh.api.keys import end_jobs
from mesh.api.ndif.routes import JobsApi
from mesh.api.overview import NodeParts, Overview
from mesh.api.renewal import follow_renewals
from mesh.api.server import ApiServer, serve_api
from mesh.api.services import ApiSettings, Services
from mesh.api.tls import api_tls
from mesh.clock import SystemClock, next_tick
from mesh.config import Config
from mesh.discovery.advertisement import Advertisement
from mesh.discovery.directory import Offering, ShardStore
from mesh.discovery.distance import Distances
from mesh.discovery.events import PeerEvent
from mesh.discovery.notices import EXPIRY_FACTOR
from mesh.health.detector import FailureDetector, NodeHealth
from mesh.health.eventstream import EventFeed
from mesh.health.metrics import Metrics
from mesh.health.peerwatch import PeerWatch
from mesh.hearth.control import Control
from mesh.hearth.network import Network
from mesh.hearth.network_settings import NetworkHooks, NetworkSettings
from mesh.hearth.publishing import Serving
from mesh.identity.api_keys import ApiKeys, new_owner_key
from mesh.identity.keys import NodeKey
from mesh.interventions.jobs.supervisor import JobsSupervisor
from mesh.models.local import LocalModel
from mesh.node import wiring
from mesh.node.coordination import CoordinationHere
from mesh.node.deploying import House
from mesh.node.deployments_here import DeploymentsHere
from mesh.node.estimates import EstimateContext, Estimates
from mesh.node.exposure import PrivacyReport
from mesh.node.holdings import Holdings
from mesh.node.job_queue import start_queue
from mesh.node.offers import Offers
from mesh.node.own_capacity import OwnHooks
from mesh.node.own_devices import OwnDevices
from mesh.node.own_facts import own_facts
from mesh.node.reach import ReachProbe
from mesh.node.weights import Weights
from mesh.paths import StatePaths
from mesh.pipeline.askers import Askers
from mesh.pipeline.commands import Offer
from mesh.pipeline.live import LiveCounts
from mesh.processes.supervisor import Supervisor
from mesh.processes.tasks import end, spawn
from mesh.research.harvest.control import Harvests
from mesh.research.steering.control import Steering
from mesh.runtime import DaemonRecord
from mesh.types import BringingUp, Done, LayerRange, ModelId, NodeId, RouteHop, StreamFrame
from mesh.wire.limits import DEFAULT_LIMITS

logger = logging.getLogger(__name__)
PUSH_TICK_S = 1.0


class Node:
    """One running daemon. `start`, then `stop`; both once."""

    def __init__(
        self, config: Config, key: NodeKey, models: Sequence[LocalModel], addresses: Sequence[str]
    ) -> None:
        """`addresses` are those at which others reach this machine, loopback if there is none."""
        self._config = config
        self._key = key
        self._clock = SystemClock()
        self._started_at = self._clock.now()
        self._events = EventFeed(self._clock)
        self._metrics = Metrics()
        self.stepped = self._metrics.steps
        self._counts = LiveCounts(self._clock, self._events.stir, self._metrics.generations)
        self._accounts = ResourceLedger(self._clock, allowances.DAEMON)
        timeout_s = config.distributed.shard_health_timeout_seconds
        self._store = ShardStore(self._clock, expiry_s=timeout_s * EXPIRY_FACTOR)
        # A peer is heard with every ping of its link and every renewal of its advertisement.
        expected_s = min(DEFAULT_LIMITS.ping_interval_s, timeout_s / 3)
        detector = FailureDetector(self._clock, expected_s=expected_s, ceiling_s=timeout_s)
        self._addresses = addresses
        network = self._network = self._make_network(addresses[0])
        self._watch = PeerWatch(detector, network.silences, self._on_verdict)
        distances = Distances(key.node_id, config.interface)
        self._offers = Offers(network, self._store, self._watch, distances)
        held = self._held = Holdings(config, key, models, self, network.tls_material)
        looks = (self._is_idle, self._served, self.asker_changed, *wiring.blocking_looks(config))
        hooks = OwnHooks(
            lambda: held.host.health.memory, *looks, kv_tokens=config.distributed.host.kv_tokens
        )
        self._capacity = OwnDevices(config, held.host, hooks)
        self.weights = Weights(
            config, key, held, self._store, self._events, network.advertise, addresses[0]
        )
        house = House(config, key.node_id, held, network, self._store, self._counts.awaits)
        house.free_on_devices = self._capacity.free_mb
        self._deployments = DeploymentsHere(
            config, house, held, self._events, self.weights, network.advertise
        )
        self._coordination = CoordinationHere(
            config, key.node_id, held.models, network, self._store, self._served, self._events
        )
        self._steering = Steering(network, held.models, StatePaths(config.state_dir).steering_dir)
        self._jobs = JobsSupervisor(None, held.models, self)
        self._queue: JobsApi | None = None
        self._api: ApiServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_paused = False
        # Made anew at each start: whoever can read the runtime file may administer this node.
        self._owner_key = config.api_key or new_owner_key()

    async def start(self) -> None:
        """Listen, start the processes, tell the neighbours. Raises PortInUse, BadValue and kin."""
        network = self._network
        await network.start()
        tls = await network.tls_material()
        await self._held.start(self._addresses[0])
        self._held.host.revoke_tokens(sorted(network.revoked_tokens()))
        await self.weights.start(tls)
        self._jobs.first_command = wiring.start_jobs(self._config, self._key, tls)
        watchers = (self._clock, self._events, self._metrics)
        self._queue = await start_queue(self._config, self._jobs, *watchers)
        await self._start_api(self._queue)
        self._deployments.start()
        self._coordination.start()
        self._tasks.append(spawn(self._push_shards(), "push shards"))
        self._tasks.append(spawn(self._watch.run(), "watch peers"))
        self._capacity.start()

    async def stop(self) -> None:
        """Say goodbye first, so that nobody routes here any more; then end the processes.

        Running answers, ours and others', get `drain_seconds` to end or to move elsewhere.
        """
        await end(self._tasks)
        await self._deployments.stop()
        await self._coordination.stop()
        await asyncio.gather(self._held.home.stop(), self._capacity.stop())
        await self._network.stop()
        grace_s = self._config.distributed.host.drain_seconds
        await asyncio.gather(self._held.host.drain(grace_s), self._close_api(grace_s))
        await self._held.stop_asking()
        await self._jobs.stop()
        await self.weights.stop()
        await self._steering.close()

    async def _close_api(self, grace_s: float) -> None:
        """Jobs first, so that their clients are told before the sockets close."""
        if self._queue is not None:
            await self._queue.queue.stop(grace_s)
        if self._api is not None:
            await self._api.close(grace_s)

    def record(self) -> DaemonRecord:
        """Where this daemon answers, for the runtime file. Only after `start`."""
        api, network = self._api, self._network
        assert api is not None  # noqa: S101 - made in `start`
        return DaemonRecord.for_this_process(
            **api.reached(network.host),
            port=network.port,
            api_key=self._owner_key,
            keyless=self._config.is_keyless,
            drain_s=self._config.distributed.host.drain_seconds,
            holds_none=set(self._config.layers) == {"none"},
        )

    # Parts

    def _make_network(self, address: str) -> Network:
        settings = NetworkSettings.of(self._config, self._key.node_id, wiring.SOFTWARE, address)
        hooks = NetworkHooks(
            self._serving,
            self._on_peer,
            self._on_members,
            lambda kind, fields: self._events.emit(kind, **fields),
        )
        paths = StatePaths(self._config.state_dir)
        return Network(self._key, paths, settings, self._store, self._clock, hooks, self._accounts)

    async def _start_api(self, queue: JobsApi) -> None:
        config, held, network, own = self._config, self._held, self._network, self._key.node_id
        parts = NodeParts(
            node=self._facts,
            models=held.models,
            store=self._store,
            peers=network.peers,
            askers=held.askers,
            host=held.host,
            events=self._events,
            metrics=self._metrics,
            verdict=self._watch.verdict,
            privacy=PrivacyReport(config, own, held.models, held.askers, self.routable),
            lacking=held.home.lacking,
            processes=self._processes,
            accounts=self._reports,
            deployments=self._deployments.control.view,
            counts=self._counts,
            weights=self.weights.fetcher,
            software=wiring.SOFTWARE,
        )
        settings = ApiSettings(
            config.api_host, self._owner_key, keyless=config.is_keyless, accounts=self._accounts
        )
        keys = await asyncio.to_thread(ApiKeys.load, StatePaths(config.state_dir).api_keys)
        await end_jobs(queue.queue, keys)  # one may have been revoked while nobody was up
        services = Services(
            self._steering, Harvests(held.models, held.askers), self._deployments.control,
            self._planner(), self._coordination, self.weights.pulls,
            ReachProbe(own, network, self._store, self.weights.held),
        )  # fmt: skip
        app = create_app(
            self._answering(), Overview(parts), settings, Control(network), keys, queue, services
        )
        tls = await asyncio.to_thread(api_tls, config, self._addresses)
        api = self._api = await serve_api(app, config.api_host, config.api_port, tls)
        if (named := config.api_tls_cert) is not None:
            renewals = follow_renewals(api, named, config.api_tls_key or named, self._events)
            self._tasks.append(spawn(renewals, "follow the API's certificate"))

    def _answering(self) -> Askers:
        return Askers(
            self._held.askers,
            entrance=wiring.entrance(self._config),
            why_disabled=self._held.why_disabled,
            prepared=self._steering.prepared,
            on_frame=self._on_frame,
            counts=self._counts,
            bring_up=self._deployments.waker.bring_up,
        )

    def _planner(self) -> Estimates:
        """What plans are asked of; from now on deployments are laid out by it, too."""
        deployments = self._deployments
        around = EstimateContext(
            self._key.node_id, self._config, self._store, self._offers.rtt_ms,
            self._network.may_serve, self._watch.verdict, self._held.askers.__contains__,
            self.weights.held, self._capacity.asker_ms, self._capacity.asked,
            deployments.house.names, deployments.control.room_of_others,
            deployments.house.spoken_for,
        )  # fmt: skip
        estimates = deployments.house.layouts.planner = Estimates(around, deployments.weights)
        return estimates

    # What the parts ask

    def _facts(self) -> dict[str, Any]:
        said = own_facts(self._config, self._key.node_id, self._network, self._api)
        cap = self._capacity.cap
        return {
            **said,
            "started_at": self._started_at.isoformat(),
            "paused": self._is_paused,
            "memory_cap": None if cap is None else asdict(cap),
        }

    def _reports(self) -> list[dict[str, Any]]:
        return [self._accounts.report("daemon"), *self._held.accounts(), self._jobs.accounts]

    def pause(self, paused: bool) -> None:
        """Serve nobody from now on, as before a sleep: running answers move. Or serve again, also
        what could not be loaded before."""
        if not paused:
            self._held.try_again()
            self._deployments.reconciler.try_again()
        if paused == self._is_paused:
            return
        self._is_paused = paused
        self._events.emit("node_paused" if paused else "node_resumed")
        self._held.host.pause(paused)
        self.asker_changed()

    def _serving(self) -> Serving:
        host, weights = self._held.host, self.weights.held()
        if not self._held.is_started:
            return Serving(Offering(weights=weights))
        progress = self._deployments.progress(is_paused=self._is_paused)
        offers = Offering(tuple(self._served()), weights, self._capacity.now(), progress)
        return Serving(offers, list(host.wanted))

    def _served(self) -> list[Advertisement]:
        if self._is_paused:
            return []
        return [Advertisement(s.descriptor, s.health) for s in self._held.host.serving]

    def routable(self, model_id: ModelId) -> list[Offer]:
        """The shards that an asker may route to now."""
        home = [Offer(shard) for shard in self._held.home.shards(model_id)]
        if not self._config.is_distributed:
            own = [s for s in self._served() if s.descriptor.model_id == model_id]
            return home + [Offer(shard) for shard in own]
        return home + self._offers.of(model_id)

    async def on_its_way(self, model_id: ModelId, *, may_wake: bool) -> BringingUp | None:
        """How far a model is that jobs wait for; see `Waker.on_its_way`."""
        return await self._deployments.waker.on_its_way(model_id, may_wake=may_wake)

    def asker_event(self, event: dict[str, Any]) -> None:
        """Tell people and the metrics what an asker noticed of a hop."""
        kind = event["type"]
        logger.warning("%s %s", kind, " ".join(f"{k}={v}" for k, v in event.items() if k != "type"))
        if kind in ("shard_corrupt", "shard_lied"):
            self._metrics.corruption()
        self._events.emit(kind, **{key: value for key, value in event.items() if key != "type"})

    async def load_locally(self, model_id: ModelId) -> list[RouteHop]:
        """Load the whole model here: hops over all its layers. Raises MeshError."""
        return await self._held.load_locally(model_id)

    async def load_judge(self, model_id: ModelId, layers: LayerRange) -> RouteHop:
        """Load these layers here, to check others by: a hop over them. Raises MeshError."""
        return await self._held.load_judge(model_id, layers)

    def _processes(self) -> list[Supervisor]:
        return [
            *self._held.host.processes.values(),
            *self._held.askers.values(),
            self._jobs,
            self.weights.fetcher,
        ]

    def _is_idle(self) -> bool:
        """Whether nothing loads here, and nobody is served."""
        return not self._held.is_used and all(each.load() is None for each in self._processes())

    def _on_frame(self, frame: StreamFrame) -> None:
        self._metrics.frame(frame)
        if isinstance(frame, Done):
            self._capacity.asked.take(frame)

    def asker_changed(self) -> None:
        """An asker or shard came or went: neighbours and askers are told."""
        self._held.home.look()
        self.weights.shards_changed()
        self._deployments.reconciler.look()
        self._network.advertise()

    def _on_members(self) -> None:
        """Processes trust whom the hearth trusts, and routes lead nowhere else, from now on."""
        users = self._network.users()
        self._held.trust(users, sorted(self._network.revoked_tokens()))
        self.weights.fetcher.trust(users)
        self._jobs.trust(users)

    def _on_peer(self, event: PeerEvent) -> None:
        fields = asdict(event)
        kind = fields.pop("type")
        said = [kind, *(f"{k}={v}" for k, v in fields.items())]
        # First with whom it is about: of a large hearth each has a rate of its own.
        logger.info("%s %s", " ".join(said[:3]), " ".join(said[3:]))
        self._events.emit(kind, **fields)

    def _on_verdict(self, node_id: NodeId, health: NodeHealth) -> None:
        logger.info("node=%s is %s, silent for %.1f s", node_id, health.verdict, health.silent_s)
        self._events.emit(
            f"node_{health.verdict}", node_id=node_id, silent_s=round(health.silent_s, 1)
        )
        self._held.push_shards()

    async def _push_shards(self) -> None:
        """Keep the askers' view of the mesh current: at every change, at most once per loop."""
        subscription, loop = self._store.subscribe(), asyncio.get_running_loop()
        try:
            while True:
                await subscription.wait(next_tick(PUSH_TICK_S) - loop.time())
                self._held.push_shards()
                self.weights.look()
        finally:
            subscription.close()
