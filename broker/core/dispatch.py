"""The broker's decisions, without sockets, clocks and disks: messages and time in, actions out.

    peer, message, raw frames, now  ->  handle  ->  [Send(peer, message, frames), ...]
    now                             ->  tick    ->  [Send(peer, message, frames), ...]

`Dispatcher` knows who is connected and who may send what. `ActorSide` and `LearnerSide` do the rest;
all three share one `BrokerState`.
"""

from collections.abc import Sequence

from broker.config import BrokerConfig
from broker.core.actors import ActorSide, GeneratorSide
from broker.core.autoscaling import Autoscaler
from broker.core.fleet import FOR_EVER, Limits
from broker.core.learner import LearnerSide
from broker.core.peers import Peer, Send
from broker.core.records import GroupClosed, MemoryStore, SegmentStore
from broker.core.relays import WeightsAnnouncer
from broker.core.state import BrokerState, gauges_of, look_of, wanted_counts
from broker.core.tasks import why_tasks_invalid
from protocol.codec import MAX_BODY_BYTES, MAX_HEADER_BYTES, AnyMessage, Buffer
from protocol.digest import OTHER_DIGEST, difference
from protocol.messages.episodes import (
    Checkpointed,
    Commit,
    DeliveryCredit,
    PutTasks,
    Segment,
    TaskCredit,
    TaskRejected,
)
from protocol.messages.peers import (
    Drain,
    Echo,
    Goodbye,
    Heartbeat,
    Hello,
    PublishWeights,
    QueueStats,
    Refused,
    Welcome,
)
from protocol.session import MISSED_BEATS
from protocol.wanted import Wanted, of_host

STATS_S = 1.0
SWEEP_S = 0.2
ADVISE_S = 1.0
DRAIN_S = 5.0
"""Longest time that peers get to say Goodbye when the broker ends and the run goes on later."""

SENDERS: dict[type, str] = {
    PutTasks: "learner",
    DeliveryCredit: "learner",
    Commit: "learner",
    Checkpointed: "learner",
    PublishWeights: "learner",
    TaskCredit: "actor",
    Segment: "actor",
    TaskRejected: "actor",
}


class Dispatcher:
    """The whole broker but its sockets, clock and disk.

    Args:
        run: name of the run, which every peer receives in its Welcome.
        max_policy_lag: a unit whose freshest token is older than this, in versions, is not delivered.
        now: monotonic seconds; never compared with another host's.
        boot: part of the lease ids; it must differ with each start of the process.
        limits: how long it waits for peers.

    Example:
        >>> state = Dispatcher(BrokerConfig(), run="r", max_policy_lag=4, now=0.0)
        >>> hello = Hello(role="actor", peer="a", incarnation=1)
        >>> [type(action.message).__name__ for action in state.handle("a", hello, [], 0.0)]
        ['Welcome', 'Generators', 'SegmentCredit']
        >>> state.handle("b", TaskCredit(tasks=1), [], 0.1)[0].message.code
        'unknown_peer'
    """

    def __init__(
        self,
        config: BrokerConfig,
        *,
        run: str,
        max_policy_lag: int,
        now: float,
        store: SegmentStore | None = None,
        boot: str = "",
        limits: Limits = FOR_EVER,
    ) -> None:
        self.config, self.run, self._limits = config, run, limits
        self.digest = ""
        """Digest of the run, see `protocol.digest`; "": peers of any digest are admitted."""
        self.state = BrokerState(config, MemoryStore() if store is None else store, max_policy_lag, boot)
        self.actors = ActorSide(self.state)
        announcer = WeightsAnnouncer(self.state)
        self.learners = LearnerSide(self.state, announcer)
        self.generators = GeneratorSide(self.state, announcer)
        self.wanted = Wanted()
        """What the user wants of the run now."""
        self._autoscaler = Autoscaler(limits.bounds, settle_steps=max_policy_lag + 1)
        self.over = False
        """True once a learner has said that the run is over. The process around this drains then."""
        self._draining_since: float | None = None
        self._reason = ""
        """Why the peers are asked to end."""
        self._swept = self._stats_sent = self._advised = self._had_learner = now

    # --- entry points -------------------------------------------------------------------------------------

    def handle(self, name: str, message: AnyMessage, frames: Sequence[Buffer], now: float) -> list[Send]:
        """Handle one message of the peer ``name``; return the actions.

        ``frames``: the raw header of the message and the frames after it.
        """
        self.act_on(name, message, frames, now)
        return self.follow(now)

    def act_on(self, name: str, message: AnyMessage, frames: Sequence[Buffer], now: float) -> None:
        """Do what one message of the peer ``name`` says, see `handle`. What follows from it is left to `follow`."""
        peer = self.state.peers.get(name)
        if isinstance(message, Hello):
            self._hello(name, message, now)
        elif isinstance(message, Echo):
            self.state.outbox.send(name, message)
        elif peer is not None:
            peer.heard = now
            own = peer.hello.role
            role = SENDERS.get(type(message), own)
            if role == own:
                self._from_peer(peer, message, frames, now)
            else:
                text = f"{type(message).__name__} is for a {role} to send, {name} is a {peer.role}"
                self.state.outbox.refuse(name, "wrong_role", text)
        elif not isinstance(message, Goodbye):
            text = "say Hello first; this broker does not know you (any more)"
            self.state.outbox.refuse(name, "unknown_peer", text)

    def follow(self, now: float) -> list[Send]:
        """Deliver units, lease tasks, send notices and lists as far as possible now; return the actions."""
        self.generators.offer(now)
        if self._draining_since is None:
            if self.state.deliveries.ready:
                self.learners.deliver(now)
            if self.actors.hungry and (not self.state.full() or self.learners.starving(now)):
                self.actors.lease_tasks(now)
        self.learners.send_notices()
        return self.state.outbox.take_queued()

    def tick(self, now: float) -> list[Send]:
        """Do what is due at this time; return the actions. Call it about twenty times a second."""
        if now - self._swept >= SWEEP_S:
            self._sweep(now)
        learner = self.learners.learner
        if learner is not None and now - self._stats_sent >= STATS_S:
            self._stats_sent = now
            self.state.outbox.send(learner.name, QueueStats(gauges=gauges_of(self.state)))
            self.learners.check_ledger()
        return self.follow(now)

    def refuse(self, name: str, code: str, text: str) -> list[Send]:
        """Refuse frames of the peer ``name`` that are not to be handled; return the actions."""
        self.state.outbox.refuse(name, code, text)
        return self.state.outbox.take_queued()

    def admit(self, actor_keys: Sequence[str], revoked: Sequence[str], now: float) -> list[Send]:
        """Note which keys are admitted now; return the actions. Call it when the keys folder has changed.

        Args:
            actor_keys: public keys (Z85) of actors, for generators.
            revoked: names of peers whose keys are not admitted any more. They are lost at once.
        """
        for name in revoked:
            if (peer := self.state.peers.get(name)) is not None:
                self._lose(peer, now, fault=True)
        self.generators.admit(actor_keys)
        return self.follow(now)

    def drain(self, reason: str, now: float) -> list[Send]:
        """Ask every peer to finish; return the actions. From now on nothing is leased or delivered."""
        self._draining_since, self._reason = now, reason
        for peer in self.state.peers:
            self._ask_to_leave(peer, reason, over=self.over)
        return self.follow(now)

    def ask_to_leave(self, name: str, reason: str, now: float) -> list[Send]:
        """Ask one peer, or all generators and actors of a host, to finish; return the actions.

        Args:
            name: name of the peer, or of the host.
        """
        meant = [peer for peer in self.state.peers if peer.name == name or of_host(peer.name, name)]
        for peer in meant:
            if peer.role != "learner":
                peer.asked_to_leave = True
                self.state.outbox.send(peer.name, Drain(reason=reason))
        return self.follow(now)

    def drained(self, now: float) -> bool:
        """Return whether the process may end: all peers have said Goodbye, or their time is over.

        They have `DRAIN_S`, or `Limits.over_s` if the run is over.
        """
        if self._draining_since is None:
            return False
        longest_s = self._limits.over_s if self.over else DRAIN_S
        return len(self.state.peers) == 0 or now - self._draining_since > longest_s

    def _ask_to_leave(self, peer: Peer, reason: str, *, over: bool) -> None:
        """Ask a peer to end. If the run is not over, it is to tell its supervisor that another start makes sense."""
        peer.asked_to_leave = True
        self.state.outbox.send(peer.name, Drain(reason=reason, then="over" if over else "resumed"))

    # --- joining and leaving ------------------------------------------------------------------------------

    def _hello(self, name: str, hello: Hello, now: float) -> None:
        known, refusal = self.state.peers.get(name), self.objection(name, hello)
        if refusal is not None:
            self.state.ledger.refuse(refusal.code)
            self.state.outbox.send(name, refusal)
            return
        if known is not None and (known.hello.incarnation, known.role) != (hello.incarnation, hello.role):
            self._lose(known, now, fault=True)
        peer = self.state.peers.add(hello, now)
        self.state.hosts.joined(peer, now)
        if hello.role == "learner":
            self.learners.joined(peer, now)
        elif hello.role == "actor":
            self.actors.tell_leases(peer, now)
        self.state.outbox.send(name, self._welcome(peer))
        if hello.role == "actor":
            self.generators.actor_joined(peer)
            self.actors.joined(peer, trickle=self.learners.starving(now))
        elif hello.role == "generator":
            self.generators.joined(peer, now)
        else:
            self.learners.welcome(peer)
        if self._draining_since is not None:
            self._ask_to_leave(peer, self._reason, over=self.over)

    def objection(self, name: str, hello: Hello) -> Refused | None:
        """Return the refusal that the peer ``name`` would get for this Hello, or None. Changes nothing."""
        refusal = self.state.peers.objection(name, hello)
        if refusal is None and (differs := difference(self.digest, hello.digest)):
            text = f"{hello.peer} {OTHER_DIGEST}: {differs}; make the ticket anew with `offbeat ticket`"
            return Refused(code="wrong_digest", message=text, fatal=True)
        if refusal is None and hello.role == "learner":
            return self.learners.objection(hello)
        return refusal

    def _welcome(self, peer: Peer) -> Welcome:
        return Welcome(
            run=self.run,
            epoch=self.state.lineage.epoch if self.state.lineage else 0,
            heartbeat_s=self.config.heartbeat_s,
            policy_version=self.learners.policy_version,
            limits={
                "header_bytes": MAX_HEADER_BYTES,
                "body_bytes": MAX_BODY_BYTES,
                "queued_tasks": self.config.max_queued_tasks,
                "unacknowledged_segments": self.config.segment_credit,
            },
            attempt=peer.hello.attempt,
            place=peer.place,
        )

    def _lose(self, peer: Peer, now: float, *, fault: bool) -> None:
        """Remove a peer that was lost (``fault``) or left on purpose; its leases end as its role requires."""
        self.state.peers.remove(peer.name)
        leases = len(self.state.tasks.held_by(peer.name)) if peer.role == "actor" else 0
        self.state.hosts.left(peer, fault=fault, leases=leases)
        if peer.role == "actor":
            self.actors.left(peer, now, fault=fault)
            self.generators.actor_left(peer.name)
        elif peer.role == "learner":
            self.learners.left(peer, on_purpose=not fault)
        else:
            self.generators.left(peer)

    def _from_peer(self, peer: Peer, message: AnyMessage, frames: Sequence[Buffer], now: float) -> None:
        # The most frequent messages come first.
        match message:
            case Segment():
                self.actors.segment(peer, message, frames, now, trickle=self.learners.starving(now))
            case TaskCredit():
                self.actors.credited(peer, message.tasks, void=message.void)
            case Commit():
                if self.learners.commit(peer, message, now):
                    self.actors.grant_short(trickle=self.learners.starving(now))
            case DeliveryCredit():
                self.learners.credited(peer, message.units)
            case Heartbeat():
                peer.beat(message, now)
                self.state.outbox.send(peer.name, Heartbeat(policy_version=self.learners.policy_version))
                if peer.role == "generator":
                    self.generators.beat(peer, now)
            case Goodbye():
                self.over |= message.then == "over" and peer is self.learners.learner
                self._lose(peer, now, fault=False)
            case PutTasks():
                if why := why_tasks_invalid(message.tasks, frames):
                    self.state.outbox.refuse(peer.name, "bad_task", why)
                else:
                    self.learners.put_tasks(peer, message, now)
            case Checkpointed():
                self.learners.checkpointed(peer, message, now)
            case PublishWeights():
                self.learners.publish(peer, message, now)
            case TaskRejected():
                self.actors.rejected(peer, message, now)
            case _:
                text = f"{type(message).__name__} is not for the broker"
                self.state.outbox.refuse(peer.name, "unexpected", text)

    # --- consequences -------------------------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        elapsed, self._swept = now - self._swept, now
        silence = MISSED_BEATS * self.config.heartbeat_s
        for peer in self.state.peers:
            if now - peer.heard > silence:
                self.state.ledger.task("peers_lost")
                self._lose(peer, now, fault=True)
            elif peer.role == "generator":
                self.generators.look_at(peer, now)
        self._send_orphans_away(now)
        self._advise(now)
        tasks = self.state.tasks
        self.state.capacity.look(
            tasks=tasks.queued + tasks.leased,
            generators=len(self.generators.offered),
            actors=len(self.state.peers.of("actor")),
            now=now,
        )
        self.actors.sweep(elapsed, now, trickle=self.learners.starving(now))
        if self.state.full():
            self.state.assembly.postpone(elapsed)
        for group_id in self.state.assembly.overdue(now):
            self.state.record(GroupClosed(group_id=group_id), now)
        self.learners.sweep(now)

    def _advise(self, now: float) -> None:
        """Take a look at the numbers of generators and actors, once a second."""
        if now - self._advised < ADVISE_S:
            return
        self._advised = now
        look = look_of(self.state, now)
        self.state.advice = self._autoscaler.look(look, wanted_counts(look, self.state, self.wanted))

    def _send_orphans_away(self, now: float) -> None:
        """Ask the peers to end that have waited for a learner for too long."""
        if self.learners.learner is not None:
            self._had_learner = now
        if now - self._had_learner <= self._limits.orphan_s or self._draining_since is not None:
            return
        for peer in self.state.peers:
            without_s = now - max(self._had_learner, peer.joined)
            if without_s > self._limits.orphan_s and not peer.asked_to_leave:
                why = (
                    f"no learner has been there for {without_s / 60:.0f} minutes (fleet.orphan_minutes); start this "
                    "process again when one is"
                )
                self._ask_to_leave(peer, why, over=False)
