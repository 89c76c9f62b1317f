"""The actors of a simulated run: which one gets the next task, and which generator it asks. Pure."""

from launch.plan.parts import SimulatedEpisode


class SimulatedActors:
    """Room of each actor for episodes, and its requests at each generator.

    Args:
        episodes: episodes that each actor runs at a time.
    """

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes
        self._free: dict[int, int] = {}
        """Free episodes of each actor that has room. The first actor gets the next task."""
        self._streams: dict[int, list[int]] = {}

    @property
    def room(self) -> bool:
        """Whether an actor can take another task."""
        return bool(self._free)

    def join(self, actor: int, generators: int) -> None:
        """Add an actor that knows so many generators."""
        self._free[actor] = self._episodes
        self._streams[actor] = [0] * generators

    def add_generator(self) -> None:
        """Make one more generator known to all actors."""
        for streams in self._streams.values():
            streams.append(0)

    def take(self, episode: SimulatedEpisode) -> None:
        """Give an episode to the actor whose turn it is."""
        actor = next(iter(self._free))
        room = self._free.pop(actor) - 1
        if room:
            self._free[actor] = room
        episode.actor = actor

    def ask(self, episode: SimulatedEpisode) -> int:
        """Return the generator of an episode's next turn; at first the one its actor has fewest requests at."""
        streams = self._streams[episode.actor]
        if episode.generator < 0:
            episode.generator = streams.index(min(streams))
        streams[episode.generator] += 1
        return episode.generator

    def answered(self, episode: SimulatedEpisode) -> None:
        """Take note that a turn has ended."""
        self._streams[episode.actor][episode.generator] -= 1

    def finish(self, episode: SimulatedEpisode) -> None:
        """Make room where an episode has ended."""
        self._free[episode.actor] = self._free.get(episode.actor, 0) + 1
