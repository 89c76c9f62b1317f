"""The suite of agents: rows, and a function that runs an agent on one of them."""

from copy import deepcopy
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args

from envs.agent.command import CERTIFICATE, agent_command
from envs.agent.endpoint import Endpoint
from envs.agent.episode import AgentEpisode, AgentRules
from envs.agent.message_tree import Trained
from envs.agent.place import LISTEN, place_of
from envs.base import ChatMessage, Env, Split, SuiteFacts
from envs.errors import EnvError
from envs.reasoning_gym_suite import task_of
from envs.rows.reading import DataRow, read_rows
from envs.rows.splitting import divided, key_of, of_task
from envs.user_code import absolute_beside_run_file, code_beside_run_file, code_file, load_callable
from protocol.security.http import CERTIFICATE_FILE

FILES = ("train", "heldout")
"""Parameters that name a data set."""


class AgentSuite:
    """Suite with one task for each row of a data set. The user's agent works on the row.

    The agent speaks to an endpoint in the form of OpenAI's API, and its function returns the reward.

    Args:
        run: the agent, as ``file.py:function`` or ``module:function``. It takes ``(row, base_url, api_key)``, is
            asynchronous or plain, and returns a number or a table of numbers by name. Or a list: the program and the
            arguments of a command, see `envs.agent.command`.
        train: file of the rows (.jsonl, .jsonl.gz, .json, .csv, .parquet), or a data set of the hub.
        score: function that scores an episode when the agent has ended, in place of what it returns. It takes
            ``(row, result)``: the row, and what the agent returned, or the end of a command's output. Empty: none.
        heldout: file of the held-out rows, or the share of the rows of ``train`` that is held out, by a hash of the
            row, at least 0 and below 1.
        correct: reward that says whether a task was solved. Empty: the only one.
        solved_at: smallest value of this reward with which a task counts as solved.
        seed: seed of the order of the rows in each epoch.
        trained: which answers are trained. "tools": those to requests with tools, if the episode has any. "main": those
            to requests with the tools of the longest conversation. "all": those to titles and probes, too.
        timeout_s: longest time from the agent's start to its end, in seconds; 0: no bound of its own.
        at_timeout: "fail": the episode of an agent that takes longer fails. "score": the agent is ended, and scored as
            it stands.
        history: "sampled": what was sampled stays in the context, however it comes back. "template": each request is
            rendered as a whole, as other servers do it. Where the template changes an earlier answer, as by leaving
            out its thought, a branch begins.
        listen: HOST:PORT of the endpoint; port 0 takes a free one. Hosts other than loopback need ``keys``.
        keys: folder with the certificate (`http.crt`) and its private key, see `offbeat keys make`. With it, the
            endpoint speaks TLS only.
        advertised_host: host in the address that agents get; empty: that of ``listen``, or this machine's name.

    Raises:
        EnvError: a file, a row, the function or a setting is wrong; the text names file and line.
    """

    def __init__(
        self,
        run: str | list[str],
        train: str,
        score: str = "",
        heldout: str | float = 0.1,
        correct: str = "",
        solved_at: float = 1.0,
        seed: int = 0,
        trained: str = "tools",
        timeout_s: float = 0.0,
        at_timeout: str = "fail",
        history: str = "sampled",
        listen: str = LISTEN,
        keys: str = "",
        advertised_host: str = "",
    ) -> None:
        self._rules = _rules(timeout_s, at_timeout, history)
        if trained not in get_args(Trained):
            raise EnvError(f"params.trained = {trained!r}: give one of {', '.join(get_args(Trained))}")
        self._trained = cast(Trained, trained)
        if isinstance(run, list) and not (run and all(isinstance(word, str) for word in run)):
            raise EnvError(f"params.run = {run!r}: a command is a list of texts, the program first")
        place = place_of(listen, keys, advertised_host)
        access = {CERTIFICATE: str(place.keys / CERTIFICATE_FILE)} if place.keys is not None else {}
        loaded: dict[str, ModuleType] = {}
        self._run = (
            agent_command(run, access) if isinstance(run, list) else load_callable(run, "agent", loaded)
        )
        self._score = load_callable(score, "score", loaded) if score else None
        self._correct, self._solved_at, self._seed = correct, float(solved_at), seed
        self._rows = _split(read_rows(train, "train"), heldout)
        self._endpoint, self._port = Endpoint(place), place.port

    @staticmethod
    def find_files(params: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return the params with the paths by which every role finds the files; see `envs.registry.beside`."""
        found = dict(params)
        for name in (*FILES, *(("keys",) if found.get("keys") else ())):
            if isinstance(found.get(name), str):
                found[name] = absolute_beside_run_file(found[name], folder)
        for name in ("run", "score"):
            if isinstance(found.get(name), str) and found[name]:
                found[name] = code_beside_run_file(found[name], folder, absolute_beside_run_file)
        return found

    @staticmethod
    def files(params: dict[str, Any]) -> list[str]:
        """Return the files that make the tasks: those of the rows, and of the agent."""
        code = [params.get(name) for name in ("run", "score")]
        named = [
            *(params.get(name) for name in FILES),
            *(code_file(name) for name in code if isinstance(name, str)),
        ]
        return [text for text in named if isinstance(text, str) and text]

    @staticmethod
    def fingerprint(params: dict[str, Any]) -> str:
        """Return a hash of the training rows' file, by which a tiny model made from it is kept; "" without one."""
        path = Path(str(params.get("train")))
        return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.is_file() else ""

    def episode(self) -> Env:
        episode = AgentEpisode(
            self._run,
            self._score,
            self._endpoint,
            self._begin,
            self._solved,
            self._trained,
            self._rules,
        )
        return cast(Env, episode)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return the conversation in a row's column `messages`.

        Raises:
            LookupError: the row has none. What an agent would send is not known beforehand.
        """
        messages = self._row(index, split).values.get("messages")
        if not isinstance(messages, list) or not messages:
            raise LookupError("a row of an agent has a demonstration only if it has the column `messages`")
        return messages

    def facts(self) -> SuiteFacts:
        """Return the number of held-out rows, and the port of the endpoint. An agent writes its prompts itself."""
        return SuiteFacts(
            heldout_tasks=len(self._rows["heldout"]),
            hints=False,
            own_prompts=True,
            fixed_ports=(self._port,) if self._port else (),
        )

    def gauges(self) -> dict[str, float]:
        """Return what agents asked for, and what became of it."""
        return self._endpoint.counts.gauges()

    async def close(self) -> None:
        await self._endpoint.close()

    def _begin(self, data: dict[str, Any]) -> DataRow:
        row = self._row(*task_of(data))
        # Code of the user may change what it is given, and the row comes again in other episodes.
        return replace(row, values=deepcopy(row.values))

    def _row(self, index: int, split: Split) -> DataRow:
        return of_task(self._rows, index, split, self._seed)

    def _solved(self, rewards: dict[str, float]) -> bool | None:
        """Return whether the reward that decides is high enough; None if it is not known which one decides."""
        name = self._correct or (next(iter(rewards)) if len(rewards) == 1 else "")
        return rewards[name] >= self._solved_at if name in rewards else None


def _rules(timeout_s: float, at_timeout: str, history: str) -> AgentRules:
    """Return the rules of episodes.

    Raises:
        EnvError: a setting is wrong.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
        raise EnvError(f"params.timeout_s = {timeout_s!r}: give a number of seconds, or 0 for no bound")
    if at_timeout not in ("fail", "score"):
        raise EnvError(f'params.at_timeout = {at_timeout!r}: give "fail" or "score"')
    if history not in ("sampled", "template"):
        raise EnvError(f'params.history = {history!r}: give "sampled" or "template"')
    return AgentRules(float(timeout_s), at_timeout == "score", history == "template")


def _split(rows: list[DataRow], heldout: str | float) -> dict[Split, list[DataRow]]:
    """Return the rows of both splits.

    Raises:
        EnvError: the share is no share, the file cannot be read, or no row is left to train on.
    """
    if isinstance(heldout, str):
        others = read_rows(heldout, "heldout")
        known = {key_of(row.values) for row in others}
        own = [row for row in rows if key_of(row.values) not in known]
    else:
        cure = "name a file, or a share of the rows"
        own, others = divided(rows, heldout, lambda row: row.values, cure)
    if not own:
        raise EnvError(f"params.heldout = {heldout!r} leaves none of the {len(rows)} rows to train on")
    return {"train": own, "heldout": others}
