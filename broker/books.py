"""Everything the broker keeps, in one place, and the actions that are on their way out."""

from collections.abc import Sequence
from dataclasses import dataclass

from broker.admission import SegmentFlow
from broker.config import BrokerConfig
from broker.deliveries import Deliveries
from broker.ledger import Ledger
from broker.peers import Peers
from broker.store import SegmentStore
from broker.tasks import TaskBook
from broker.units import Assembly
from protocol.messages import AnyMessage, Refused


@dataclass(frozen=True)
class Send:
    """To be sent to ``peer``; ``frames`` are (header, body) pairs behind a Deliver."""

    peer: str
    message: AnyMessage
    frames: Sequence[tuple[bytes, bytes]] = ()


class Books:
    """Shared by the parts of `broker.state.BrokerState`."""

    def __init__(
        self, config: BrokerConfig, store: SegmentStore, max_policy_lag: int, boot: str = ""
    ) -> None:
        self.config = config
        self.store = store
        self.ledger = Ledger()
        self.peers = Peers()
        self.flow = SegmentFlow(config)
        self.tasks = TaskBook(
            self.ledger,
            lease_s=config.task_lease_s,
            max_attempts=config.max_attempts,
            max_queued=config.max_queued_tasks,
            boot=boot,
        )
        self.assembly = Assembly(
            store, self.ledger, min_members=config.min_group_members, deadline_s=config.group_deadline_s
        )
        self.deliveries = Deliveries(
            store,
            self.ledger,
            lease_s=config.delivery_lease_s,
            max_policy_lag=max_policy_lag,
            boot=boot,
        )
        self._out: list[Send] = []

    def send(self, peer: str, message: AnyMessage, frames: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Queue an action."""
        self._out.append(Send(peer, message, frames))

    def refuse(self, peer: str, code: str, text: str, *, fatal: bool = False) -> None:
        """Refuse a message of a peer, and count it."""
        self.ledger.refuse(code)
        self.send(peer, Refused(code=code, message=text, fatal=fatal))

    def take_actions(self) -> list[Send]:
        """The actions queued since the last call."""
        out, self._out = self._out, []
        return out

    def room(self) -> int:
        """Segment credit that may still be granted to actors."""
        return self.flow.room(len(self.store), self.store.nbytes)

    def full(self) -> bool:
        """Whether what is held has reached a bound."""
        return self.room() + self.flow.outstanding <= 0
