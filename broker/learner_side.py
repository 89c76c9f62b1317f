"""The broker towards the learner: tasks in, units out, commits, weights. Pure."""

from collections import deque

from broker.books import Books
from broker.ledger import Recent
from broker.peers import Peer
from protocol.messages import Commit, Deliver, Dropped, Hello, PublishWeights, PutTasks, Task, WeightsReady

MAX_NOTICES = 65_536
MAX_CREDIT = 1 << 20
REMIND_S = 5.0


class LearnerSide:
    """The one live learner, what it is owed, and the newest policy version."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.learner: Peer | None = None
        self.lineage: Hello | None = None
        """The newest learner's Hello, also while it is away."""
        self.weights: WeightsReady | None = None
        self._notices: deque[Dropped] = deque(maxlen=MAX_NOTICES)
        self._told = Recent(MAX_NOTICES)
        """Groups of the notices sent since the last Hello."""

    @property
    def policy_version(self) -> int:
        return self.weights.version if self.weights else 0

    def starving(self, now: float) -> bool:
        """Whether the learner wants more and there is nothing whole to give it.

        A learner that says it is busy is believed as long as it makes progress.
        """
        learner = self.learner
        if learner is None or learner.delivery_credit == 0 or self._books.deliveries.ready:
            return False
        return not learner.heartbeat.busy or learner.stalled_for(now) > self._books.config.generator_stall_s

    # --- joining and leaving ------------------------------------------------------------------------------

    def may_join(self, hello: Hello) -> bool:
        """One lineage: a lower epoch is over, and of one epoch only one learner lives. Refuses otherwise."""
        if self.lineage is None or hello.epoch > self.lineage.epoch:
            return True
        if hello.epoch < self.lineage.epoch:
            text = f"epoch {hello.epoch} is over, a learner of epoch {self.lineage.epoch} has joined"
            self._books.refuse(hello.peer, "stale_epoch", text, fatal=True)
            return False
        if self.learner is not None and self.learner.name != hello.peer:
            text = f"learner {self.learner.name!r} of the same epoch {hello.epoch} is alive"
            self._books.refuse(hello.peer, "second_learner", text)
            return False
        return True

    def joined(self, peer: Peer, now: float) -> None:
        """Take over. What is leased goes out again: it may have been lost with a connection.

        A process that comes back after a silence may commit under the leases it has; those of another are void.
        """
        before, self.lineage = self.lineage, peer.hello
        if self.learner is not None and self.learner.name != peer.name:
            text = f"a learner of epoch {peer.hello.epoch} has joined"
            self._books.refuse(self.learner.name, "stale_epoch", text, fatal=True)
            self._books.peers.remove(self.learner.name)
        self.learner = peer
        if before is None or _process(before) != _process(peer.hello):
            self._books.deliveries.return_all()
        else:
            self._books.deliveries.return_live()
        self._told = Recent(MAX_NOTICES)
        self._books.assembly.set_mode(peer.hello.deliver, now)

    def left(self, peer: Peer, *, on_purpose: bool) -> None:
        """One that is only silent keeps its deliveries: nobody else could take them meanwhile."""
        if peer is not self.learner:
            return
        self.learner = None
        if on_purpose:
            self._books.deliveries.return_all()

    # --- messages -----------------------------------------------------------------------------------------

    def credited(self, peer: Peer, units: int) -> None:
        peer.delivery_credit = min(MAX_CREDIT, peer.delivery_credit + units)

    def put(self, peer: Peer, message: PutTasks) -> None:
        """Queue new tasks, all or none."""
        books = self._books
        fresh = books.tasks.unseen(message.tasks)
        if len(fresh) > books.tasks.room():
            text = (
                f"{len(fresh)} new tasks beside {books.tasks.queued} queued ones exceed max_queued_tasks = "
                f"{books.config.max_queued_tasks}; none was taken: put them later, or raise the limit"
            )
            books.refuse(peer.name, "queue_full", text)
            return
        for task in fresh:
            if wrong := books.assembly.expect(task):
                books.refuse(peer.name, "bad_task", wrong)
            else:
                books.tasks.put(task)
        self._tell_over(message.tasks)

    def _tell_over(self, tasks: list[Task]) -> None:
        """A learner that puts tasks again whose end is past and gone has missed the notice of it."""
        books = self._books
        over: dict[str, list[Task]] = {}
        for task in tasks:
            if task.task_id in books.tasks.over and task.group_id not in self._told:
                over.setdefault(task.group_id, []).append(task)
        if not over:
            return
        held = books.tasks.groups() | {unit.group_id for unit in books.deliveries.units()}
        for group_id in sorted(over.keys() - held - books.assembly.groups.keys()):
            ended = over[group_id]
            unit_id = ended[0].task_id if ended[0].purpose == "eval" else group_id
            notice = Dropped(unit_id=unit_id, group_id=group_id, trajectories=len(ended), reason="over")
            self._notices.append(notice)

    def commit(self, peer: Peer, message: Commit, now: float) -> bool:
        """Let go of what the learner is done with; False when refused."""
        if not self._of_this_epoch(peer, message.epoch, "Commit"):
            return False
        peer.grew_at = peer.progress_at = now
        unknown = self._books.deliveries.commit(message.trained, "trained")
        unknown += self._books.deliveries.commit(message.dropped, "dropped")
        for _ in unknown:
            self._books.ledger.refuse("unknown_lease")
        self._books.ledger.replayed_tokens += message.replayed_tokens
        return True

    def publish(self, peer: Peer, message: PublishWeights) -> None:
        """Note the newest version and pass it on to generators."""
        if not self._of_this_epoch(peer, message.epoch, "PublishWeights"):
            return
        offered = (message.epoch, message.version)
        if self.weights is not None and offered < (self.weights.epoch, self.weights.version):
            text = f"version {message.version} is older than {self.weights.version}, published in this epoch"
            self._books.refuse(peer.name, "stale_version", text)
            return
        self.weights = WeightsReady(epoch=message.epoch, version=message.version, manifest=message.manifest)
        for generator in self._books.peers.of("generator"):
            self._books.send(generator.name, self.weights)

    def remind(self, generator: Peer, now: float) -> None:
        """Repeat the announcement to a generator that serves another version: it may have been lost."""
        if self.weights is None or generator.heartbeat.policy_version == self.weights.version:
            return
        if now - generator.reminded_at >= REMIND_S:
            generator.reminded_at = now
            self._books.send(generator.name, self.weights)

    def _of_this_epoch(self, peer: Peer, epoch: int, what: str) -> bool:
        if epoch == peer.hello.epoch:
            return True
        text = f"{what} of epoch {epoch}, but the learner joined with epoch {peer.hello.epoch}"
        self._books.refuse(peer.name, "stale_epoch", text, fatal=epoch < peer.hello.epoch)
        return False

    # --- deliveries ---------------------------------------------------------------------------------------

    def notify(self, dropped: list[Dropped]) -> None:
        """Tell the learner, now or when it is back, what it will never get."""
        self._notices.extend(dropped)

    def send_notices(self) -> None:
        while self.learner is not None and self._notices:
            notice = self._notices.popleft()
            self._told.add(notice.group_id, 0)
            self._books.send(self.learner.name, notice)

    def deliver(self, now: float) -> None:
        """Lease ready units to the learner, oldest first, as far as its credit reaches."""
        books, learner = self._books, self.learner
        while learner is not None and learner.delivery_credit > 0:
            unit, stale = books.deliveries.take(self.policy_version)
            self.notify(stale)
            if unit is None:
                return
            learner.delivery_credit -= 1
            deliver = Deliver(
                lease_id=books.deliveries.lease(unit, now),
                unit_id=unit.unit_id,
                segments=len(unit.pieces),
                complete=unit.complete,
                redelivered=unit.redelivered,
            )
            books.send(learner.name, deliver, books.deliveries.frames(unit))

    def sweep(self, now: float) -> None:
        """Return leases of a learner that makes no progress, or that stays away."""
        self._books.deliveries.expire(self.learner.grew_at if self.learner else 0.0, now)


def _process(hello: Hello) -> tuple[str, int, int]:
    return hello.peer, hello.incarnation, hello.epoch
