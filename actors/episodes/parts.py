"""What a way of playing an episode needs."""

from dataclasses import dataclass

from actors.episodes.answers import TurnSampler
from actors.episodes.clock import EpisodeClock
from actors.episodes.conversation import Conversations
from actors.episodes.env_calls import EnvCalls
from actors.episodes.segment_stream import SegmentStream
from protocol.messages.tasks import Task


@dataclass(frozen=True)
class EpisodeParts:
    """The parts of one episode."""

    task: Task
    max_turns: int
    calls: EnvCalls
    clock: EpisodeClock
    conversations: Conversations
    sampler: TurnSampler
    stream: SegmentStream
