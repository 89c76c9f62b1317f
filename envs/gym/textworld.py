"""Suite of games of TextWorld: a turn of the model is a command, and the game's answer the next observation."""

import importlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.calls import without_thought
from envs.errors import EnvError, ServiceFailed
from envs.gym.suite import ROLES, filled
from envs.reasoning_gym_suite import opening, task_of
from envs.rows.reading import divided, of_task
from envs.user_code import absolute_beside_run_file

STUCK = 2.0
"""Whoever is inside for so many times the wait of another one does not come back."""


class LibraryLock:
    """Lock of a library, for all of its users in the process.

    Args:
        library: its name, for errors.
        clock: returns a monotonic time, in seconds.

    Example:
        >>> lock = LibraryLock("TextWorld", clock=lambda: 0.0)
        >>> with lock.held("game1.z8", wait_s=1.0):
        ...     with lock.held("game2.z8", wait_s=0.01):
        ...         pass
        Traceback (most recent call last):
        envs.errors.ServiceFailed: game2.z8 has waited 0.01 s for TextWorld, which one thread at a time may use: \
game1.z8 is in it
    """

    def __init__(self, library: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._library, self._clock, self._lock = library, clock, threading.Lock()
        self._inside = ""
        """Holder of the lock. Invariant: written by the thread that holds it; others read it for errors only."""
        self._since = 0.0
        """Time at which it went in."""

    @contextmanager
    def held(self, who: str, wait_s: float) -> Iterator[None]:
        """Hold the lock.

        Args:
            who: words for the errors of others.
            wait_s: longest wait, in seconds.

        Raises:
            ServiceFailed: it was not free in this time. Whoever waits is not at fault.
            EnvError: whoever is inside has been there for `STUCK` times this wait. This counts as a failure, so that
                the run ends with this reason, and does not repeat tasks for ever.
        """
        if not self._lock.acquire(timeout=wait_s):
            inside_s = self._clock() - self._since
            if self._inside and inside_s > STUCK * wait_s:
                raise EnvError(
                    f"{self._inside} has been in {self._library} for {inside_s:.3g} s, and nobody else of this process "
                    "can use it; end this actor, and another one begins anew"
                )
            raise ServiceFailed(
                f"{who} has waited {wait_s:g} s for {self._library}, which one thread at a time may use: "
                f"{self._inside or 'another one'} is in it"
            )
        self._since, self._inside = self._clock(), who
        try:
            yield
        finally:
            self._inside = ""
            self._lock.release()


INSTALL = "pip install '.[textworld]'"
PROMPT = "{observation}\n\nWrite one command on a line of its own."
SUFFIX = ".z8"
"""End of the names of games that answer with texts; TextWorld finds the files beside them."""
COMMAND = 200
"""Characters of a command that the game reads."""
CLOSE_S = 4.0
"""Longest wait for TextWorld at the end of a game; an actor gives up after 5 s."""
_ALONE = LibraryLock("TextWorld")
# Invariant: one thread at a time is in TextWorld, which reads games with a parser that all threads of a process share.
_LOGO = re.compile(r"^[\s\\|/$_>]+$\n?", re.MULTILINE)
_STATUS = re.compile(r"\n>\s*-= .*? =-\s*-?\d+/\d+\s*\Z")
_GAPS = re.compile(r"\n{3,}")


class TextWorldSuite:
    """Suite of games of TextWorld. A turn is a command, and each game is a task.

    Args:
        games: a game (.z8), a folder of games, or a list of both. `tw-make` makes games.
        heldout: share of the games that is held out, by a hash of the file's name; or a folder or list of games.
        instruction: text of a system message. Empty: there is none.
        prompt: text of the first user message, with ``{observation}`` and ``{commands}``, those that the game takes.
        observation: text of every later observation, with ``{observation}``, ``{commands}`` and ``{score}``.
        role: role of later observations, "tool" or "user". Some chat templates refuse one of them.
        seed: seed of the order of the games in each epoch.
        wait_s: longest time in seconds that a game waits for others, of which one plays at a time. Then its episode is
            given up by nobody's fault. It has to be below ``actor.env_timeout_s``, or the episode fails first.

    Raises:
        EnvError: the package or a game is not there, or a setting is wrong.
    """

    def __init__(
        self,
        games: str | list[str],
        heldout: str | list[str] | float = 0.1,
        instruction: str = "",
        prompt: str = PROMPT,
        observation: str = "{observation}",
        role: str = "tool",
        seed: int = 0,
        wait_s: float = 20.0,
    ) -> None:
        try:
            self._library = importlib.import_module("textworld")
        except ImportError as error:
            raise EnvError(
                f"env.name = 'textworld' needs the package textworld, which cannot be imported ({error}): {INSTALL}"
            ) from None
        if role not in ROLES:
            raise EnvError(f"params.role = {role!r}: write one of {', '.join(ROLES)}")
        if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 < wait_s < float("inf"):
            raise EnvError(f"params.wait_s = {wait_s!r}: write a number of seconds above 0")
        found = games_in(games, "games")
        if isinstance(heldout, str | list):
            others = games_in(heldout, "heldout")
            own = [path for path in found if path not in others]
        else:
            own, others = divided(found, heldout, lambda path: path.name, "name games, or a share of them")
        if not own:
            raise EnvError(f"params.heldout = {heldout!r} leaves none of the {len(found)} games to train on")
        self._games: dict[Split, list[Path]] = {"train": own, "heldout": others}
        self._instruction, self._prompt, self._observation = instruction, prompt, observation
        self._role, self._seed = role, seed
        self.wait_s = float(wait_s)
        self.first("", [])
        self.later("", [], 0)

    @staticmethod
    def find_files(params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the paths by which every role finds the games; see `envs.registry.beside`."""
        found = dict(params)
        for name in ("games", "heldout"):
            value = found.get(name)
            if isinstance(value, str):
                found[name] = absolute_beside_run_file(value, folder)
            elif isinstance(value, list):
                found[name] = [absolute_beside_run_file(str(path), folder) for path in value]
        return found

    @staticmethod
    def files(params: dict[str, Any]) -> list[str]:
        """Return the games."""
        named = [params.get(name) for name in ("games", "heldout")]
        lists = [[value] if isinstance(value, str) else value for value in named]
        texts = [str(text) for value in lists if isinstance(value, list) for text in value]
        return [str(path) for text in texts for path in _inside(Path(text))]

    def episode(self) -> Env:
        return cast(Env, _TextWorldEpisode(self))

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return a game played by the commands that solve it. Blocks.

        Raises:
            LookupError: the game does not tell them.
            ServiceFailed: another game has held TextWorld for too long.
        """
        path = self.game_of(index, split)
        with _ALONE.held(path.name, self.wait_s):
            game = self.start(path)
            try:
                state = game.reset()
                messages = self.first(plain_text(state.feedback), state.admissible_commands)
                # The quest may change under way, and with it the commands that solve the game.
                while not (state.won or state.lost):
                    if not state.policy_commands:
                        raise LookupError("this game of TextWorld does not tell the commands that solve it")
                    command = state.policy_commands[0]
                    state, score, _ = game.step(command)
                    messages.append({"role": "assistant", "content": command})
                    if not (state.won or state.lost):
                        text = plain_text(state.feedback)
                        messages.append(self.later(text, state.admissible_commands, score))
                return messages
            finally:
                game.close()

    def facts(self) -> SuiteFacts:
        """Return the numbers of games, and the name of the reward."""
        return SuiteFacts(
            heldout_tasks=len(self._games["heldout"]),
            reward_names=("reward",),
            train_tasks=len(self._games["train"]),
        )

    async def close(self) -> None:
        return None

    def game_of(self, index: int, split: Split) -> Path:
        """Return the game of a task.

        Raises:
            EnvError: there are fewer held-out games.
        """
        return of_task(self._games, index, split, self._seed, "games")

    def start(self, path: Path) -> Any:
        """Return a game. Call it and the game's methods with the lock."""
        wanted = self._library.EnvInfos(
            feedback=True, score=True, max_score=True, won=True, lost=True, admissible_commands=True,
            policy_commands=True,
        )  # fmt: skip
        return self._library.start(str(path), wanted)

    def first(self, text: str, commands: list[str] | None) -> list[ChatMessage]:
        """Return the first messages of an episode."""
        fields = {"observation": text, "commands": ", ".join(commands or ())}
        return opening(filled(self._prompt, "prompt", fields), self._instruction)

    def later(self, text: str, commands: list[str] | None, score: float) -> ChatMessage:
        """Return the message of a later observation."""
        fields = {"observation": text, "commands": ", ".join(commands or ()), "score": f"{score:g}"}
        return {"role": self._role, "content": filled(self._observation, "observation", fields)}


class _TextWorldEpisode:
    """Episode of one game. Its functions are plain ones, because games compute."""

    def __init__(self, suite: TextWorldSuite) -> None:
        self._suite = suite
        self._game: Any = None
        self._name, self._score, self._best = "", 0.0, 1.0

    def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        path = self._suite.game_of(*task_of(data))
        self._name = path.name
        with _ALONE.held(path.name, self._suite.wait_s):
            self._game = self._suite.start(path)
            state = self._game.reset()
        self._best = float(state.max_score or 1)
        return self._suite.first(plain_text(state.feedback), state.admissible_commands)

    def step(self, action: str) -> StepResult:
        assert self._game is not None, "step before reset"
        with _ALONE.held(self._name, self._suite.wait_s):
            state, score, over = self._game.step(command_in(action))
        reward, self._score = (float(score) - self._score) / self._best, float(score)
        info = {"game": self._name, "score": self._score, "best_score": self._best}
        if over or state.won or state.lost:
            return StepResult(rewards={"reward": reward}, done=True, correct=bool(state.won), info=info)
        text = plain_text(state.feedback)
        message = self._suite.later(text, state.admissible_commands, self._score)
        return StepResult(message, rewards={"reward": reward}, info=info)

    def close(self) -> None:
        if self._game is not None:
            with _ALONE.held(self._name, CLOSE_S):
                self._game.close()


def games_in(names: str | list[str], parameter: str) -> list[Path]:
    """Return the games that a parameter names, in the order of their paths.

    Raises:
        EnvError: there is none.
    """
    found = set[Path]()
    for name in [names] if isinstance(names, str) else names:
        here = _inside(Path(name))
        if not here or not all(p.is_file() and p.suffix == SUFFIX for p in here):
            raise EnvError(
                f"params.{parameter}: {name!r} is no game ({SUFFIX}) and no folder of games; make one "
                f"with tw-make"
            )
        found.update(here)
    if not found:
        raise EnvError(f"params.{parameter} = {names!r}: name a game, or a folder of games")
    return sorted(found)


def _inside(path: Path) -> list[Path]:
    """Return the games in a folder; the path itself if it is no folder."""
    return sorted(p for p in path.rglob("*") if p.suffix == SUFFIX) if path.is_dir() else [path]


def plain_text(feedback: str) -> str:
    """Return what a game says without its logo and the line of its status.

    Example:
        >>> plain_text("\\n  ____ \\n |  $$\\\\|\\n\\nHey.\\n\\n\\n\\nA room.\\n\\n>        -= Attic =-0/3")
        'Hey.\\n\\nA room.'
    """
    return _GAPS.sub("\n\n", _STATUS.sub("", _LOGO.sub("\n", feedback))).strip().removesuffix("\n>").strip()


def command_in(text: str) -> str:
    """Return the command in a turn: its last line, without the thought and a ``>``.

    Example:
        >>> command_in("<think>hm</think>I go.\\n> go south\\n"), command_in("")
        ('go south', '')
    """
    lines = without_thought(text).strip().splitlines() or [""]
    return lines[-1].strip().removeprefix(">").strip()[:COMMAND]
