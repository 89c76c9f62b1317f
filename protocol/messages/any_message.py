"""The union of all messages, which the decoder chooses from."""

from protocol.messages.delivery import (
    Checkpointed,
    CheckpointWanted,
    Commit,
    Deliver,
    DeliveryCredit,
    Dropped,
    Held,
)
from protocol.messages.generators import Abort, ActorKeys, Chunk, Generate, Generators, Stay
from protocol.messages.peers import Drain, Goodbye, Heartbeat, Hello, QueueStats, Refused, Welcome
from protocol.messages.segments import Segment, SegmentAck, SegmentCredit
from protocol.messages.tasks import CancelTask, LeaseTask, PutTasks, TaskCredit, TaskRejected
from protocol.messages.weights import PublishWeights, WeightsReady

AnyMessage = (
    Hello | Heartbeat | Goodbye | PutTasks | DeliveryCredit | Commit | Checkpointed | PublishWeights | TaskCredit
    | Segment | TaskRejected | Welcome | Refused | Generators | LeaseTask | CancelTask | SegmentAck | SegmentCredit
    | Held | CheckpointWanted | Deliver | Dropped | WeightsReady | ActorKeys | Drain | QueueStats | Generate | Abort
    | Stay | Chunk
)  # fmt: skip
