"""Decides from its answers whether the weights server of a run is silent, or hangs. Pure."""

from typing import NamedTuple

from launch.supervise.broker_status import Answer
from launch.weights_role import WEIGHTS


class Silence(NamedTuple):
    """What is to be done about a weights server that does not answer."""

    note: str = ""
    """Sentence for the user, once for each silence; "" if there is nothing to say."""
    hung: str = ""
    """Reason to kill the server; "" if it may go on."""


class WeightsHealth:
    """Judges the weights server by its answers.

    Args:
        named_s: seconds of silence after which it is named.
        killed_s: seconds of silence after which it hangs.

    Example:
        >>> health = WeightsHealth(named_s=5.0, killed_s=20.0)
        >>> health.look(Answer(10.0, None, "refused"), started=8.0)
        Silence(note='', hung='')
        >>> health.look(Answer(29.0, None, "refused"), started=8.0).hung
        'it has not answered for 21 s'
        >>> health.look(Answer(30.0, {}), started=8.0), health.look(Answer(34.0, None), started=8.0)
        (Silence(note='', hung=''), Silence(note='', hung=''))
    """

    def __init__(self, named_s: float, killed_s: float) -> None:
        self._named_s, self._killed_s = named_s, killed_s
        self._answered, self._named = float("-inf"), False

    def look(self, answer: Answer, started: float) -> Silence:
        """Return what is to be done after an answer, or after none.

        Args:
            started: monotonic time at which the server's process was started.
        """
        if answer.status is not None:
            self._answered, self._named = answer.at, False
            return Silence()
        silent_s = answer.at - max(self._answered, started)
        note = hung = ""
        if silent_s > self._named_s and not self._named:
            self._named = True
            note = (
                f"{WEIGHTS} has not answered for {silent_s:.0f} s: generators on other hosts get no versions from it "
                f"({answer.why})"
            )
        if silent_s > self._killed_s:
            hung = f"it has not answered for {silent_s:.0f} s"
        return Silence(note, hung)
