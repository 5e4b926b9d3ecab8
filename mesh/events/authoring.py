"""What this node itself signs: its next event, in a chain that begins again when it has to.

Works inside transactions that the log opens and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.errors import LogRefused
from mesh.events import decision as decisions
from mesh.events.decision import DecisionDraft, DecisionId, SignedDecision
from mesh.events.intake import Intake, Report
from mesh.events.recalling import Recalled
from mesh.events.rules import Membership
from mesh.events.state import State
from mesh.events.types import GENESIS, Draft, Event, EventId, Payload, Place, Sign, seal
from mesh.events.verdict import EventVerdict
from mesh.types import NodeId

Say = Callable[[Sequence[DecisionId], int], dict[str, Any]]
"""A decision's payload, made from its parents and its author's wall clock in Unix milliseconds."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where the log lies and whose it is.

    `snapshot_every` events lie between two snapshots: what a start after a crash has to fold again
    at most.
    """

    path: Path
    hearth_id: str
    own: NodeId
    snapshot_every: int = 5000


class Author:
    """This node as an author. `head` is the last place in its chain that it knows it has signed,
    `restarts` says that whatever it signs next begins a new one."""

    def __init__(self, settings: LogSettings, intake: Intake, sign: Sign) -> None:
        self.node_id = settings.own
        self.head: Place = (0, 0)
        self.restarts = False
        self.recalled = Recalled(settings.own, intake.chains)
        self._settings = settings
        self._intake = intake
        self._sign = sign

    def extend(self, event_type: str, payload: Payload, said: State) -> Event:
        """Take in this node's next event; `said` is the state with all that it has said, should it
        have to say that again. Raises LogRefused, BadEvent."""
        own, chains = self._settings.own, self._intake.chains
        generation, seq, prev = chains.next_link(own)
        is_sound = (generation, seq) > self.head and own not in chains.state.frozen
        if is_sound and not self.restarts and not chains.is_full_for(own):
            return self._offer(generation, seq, prev, (event_type, payload))
        # Whoever holds more of the old chain than is here would see a fork in its next event.
        news = said.restated(own)
        generation, seq, prev = max(generation, self.head[0]) + 1, 1, GENESIS
        for fact in news:
            event = self._offer(generation, seq, prev, fact)
            seq, prev = seq + 1, event.id
        return self._offer(generation, seq, prev, (event_type, payload))

    def decide(
        self, decision_type: str, say: Say, *, after_everything: bool, wall_ms: int | None
    ) -> tuple[Membership, SignedDecision]:
        """Take in this node's next decision; who is in then. Raises LogRefused, BadEvent.

        For a worker thread, as what it costs grows with what was decided side by side.
        """
        docket = self._intake.docket
        wall_ms = self._wall_ms() if wall_ms is None else wall_ms
        parents = docket.parents(everything=after_everything)
        draft = DecisionDraft(
            self._settings.hearth_id, self._settings.own, docket.graph.depth_after(parents),
            wall_ms, decision_type, say(parents, wall_ms), parents,
        )  # fmt: skip
        decision = decisions.seal(draft, self._sign)
        verdict = docket.offer(decision)
        if verdict is not EventVerdict.ACCEPTED:
            raise LogRefused(
                f"No node of the hearth would take this decision ({verdict}).",
                fix="See `hearthnet members`: only an anchor decides, and a forked one does not.",
            )
        return docket.derive(), decision

    def seen(self, accepted: Sequence[Event]) -> Place:
        """The head with these events, which are about to be stored."""
        own = self._settings.own
        return max([self.head, *(event.place for event in accepted if event.author == own)])

    def tell_restored(self) -> None:
        """Tell people that peers had more by this node than its own log."""
        self._intake.on_report(
            Report(
                "log_restored", self._settings.own,
                "Peers hold events of this node that its log did not have: it was damaged, lost or"
                " restored from a backup, or its key was copied.",
                "It goes on from what they hold. If the log was none of that, revoke this node and"
                " let it join with a new key.",
            )
        )  # fmt: skip

    def _offer(self, generation: int, seq: int, prev: EventId, said: tuple[str, Payload]) -> Event:
        draft = Draft(
            self._settings.hearth_id, self._settings.own, generation, seq, prev,
            self._intake.chains.lamport + 1, self._wall_ms(), *said,
        )  # fmt: skip
        event = seal(draft, self._sign)
        self._intake.take_own(event)
        return event

    def _wall_ms(self) -> int:
        return max(0, int(self._intake.clock.now().timestamp() * 1000))
