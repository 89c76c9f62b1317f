"""Test an episode with a scripted policy and environment: whatever happens, the trajectory is closed."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.env_results import bounded, finite_rewards
from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode, stopped_at
from actors.errors import EnvironmentFailed, GenerationFailed, Infrastructure, PrefixBroken, TurnRefused
from actors.play_requests import way_of_playing
from actors.sampled import Sampled
from envs.base import StepResult
from protocol.errors import ProtocolError
from protocol.messages.episodes import LeaseTask, Sampling, Task

EOS = 0


class Letters:
    """A renderer whose tokens are character codes; 0 ends a turn, and '|' separates turns."""

    eos_ids = (EOS,)

    def __init__(self):
        self.tools, self.kept = [], False

    def prompt(self, messages, tools=()):
        self.tools.append(list(tools))
        return [ord(c) for m in messages for c in m["content"]]

    def observation(self, messages, sampled, tools=()):
        self.tools.append(list(tools))
        closing = [] if sampled[-1] == EOS else [EOS]
        return [*closing, *map(ord, "".join("|" + message["content"] for message in messages))]

    def with_known_calls(self, answer):
        return answer

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids, keep_special=False):
        self.kept = keep_special
        return "".join(map(chr, ids))

    def check_prefix(self, known, prompt):
        if list(prompt[: len(known)]) != list(known):
            raise PrefixBroken("broken")


class Script:
    """A policy that answers turns one after the other; an exception in the script is raised."""

    def __init__(self, *turns):
        self.turns, self.requests = list(turns), []

    async def turn(self, request):
        self.requests.append(request)
        answer = self.turns.pop(0)
        if isinstance(answer, Exception):
            raise answer
        pieces = [answer] if isinstance(answer, str) else answer
        left = request.max_tokens
        for i, piece in enumerate(pieces):
            ids = np.array([EOS if c == "$" else ord(c) for c in piece][:left], "i4")
            left -= len(ids)
            ended = i == len(pieces) - 1 or left == 0
            reason = ("stop" if len(ids) and ids[-1] == EOS else "length") if ended else ""
            yield Sampled(ids, np.full(len(ids), -1, "f4"), np.full(len(ids), i, "i4"), reason)
            if ended:
                return


class Env:
    def __init__(self, *steps, reset=None):
        self.steps, self.actions, self.closed, self._reset = list(steps), [], 0, reset

    async def reset(self, data):
        self.data = data
        if self._reset is not None:
            return await self._reset()
        return [{"role": "user", "content": "Q:"}]

    async def step(self, action):
        self.actions.append(action)
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        if callable(step):
            return await step()
        return step

    async def close(self):
        self.closed += 1


def say(text, **rewards):
    return StepResult(observation={"role": "tool", "content": text}, rewards=rewards)


DONE = StepResult(rewards={"score": 1.0}, done=True, correct=True, info={"why": "ok"})


def play(
    env,
    script,
    bounds=None,
    deadline_s=60.0,
    text=None,
    note="",
    start=None,
    purpose="train",
    opening="",
    policy="",
    **sampling,
):
    cuts = []

    async def emit(new):
        cuts.extend(new)

    class Suite:
        def episode(self):
            return env

    task = Task(
        task_id="t", env="e", group_id="g", group_size=1, data={"index": 3}, deadline_s=deadline_s, note=note,
        purpose=purpose, start=start, opening=opening, policy=policy,
        sampling=Sampling(**({"max_turn_tokens": 16, "max_trajectory_tokens": 64} | sampling)),
    )  # fmt: skip
    lease = LeaseTask(lease_id="l", attempt=2, task=task)
    return cuts, run(lease, Suite(), script, bounds or Bounds(), emit, text)


def run(lease, suite, script, bounds, emit, text=None):
    text = text or Letters()

    async def main():
        runner = EnvironmentRunner(calls=4)
        episode = Episode(lease, suite, text, script, bounds, emit, runner, way_of_playing)
        try:
            await episode.run()
        finally:
            runner.close()
        return episode

    return asyncio.run(main())


def text_of(cuts):
    return "".join(chr(i) if i else "$" for cut in cuts for i in cut.arrays["token_ids"])


def test_an_environment_bounds_its_next_answer_and_the_bounds_of_the_run_hold():
    class Bounded(Env):
        limits = [3, None, 99]  # noqa: RUF012

        def turn_limit(self):
            return self.limits[len(self.actions)]

    script = Script("abcdef", "ghijkl$", "mnopqrstuv")
    cuts, _ = play(Bounded(say("1"), say("2"), DONE), script, max_turn_tokens=8)
    assert [request.max_tokens for request in script.requests] == [3, 8, 8]
    assert text_of(cuts).startswith("Q:abc$|1ghijkl$|2")


def test_each_branch_is_bounded_by_itself_and_all_of_them_together():
    """The whole has room for three branches of twelve tokens, of which the first is full."""
    anew = StepResult(observation={"role": "user", "content": "new:"}, after=-1)
    env = Env(anew, say("more"), DONE)
    script = Script("abcdefghij", "cd$", "efgh")
    bounds = {"max_context_tokens": 12, "max_trajectory_tokens": 40}
    cuts, episode = play(env, script, **bounds)
    assert [request.max_tokens for request in script.requests] == [10, 8]
    assert text_of(cuts) == "Q:abcdefghijnew:cd$"
    last = cuts[-1].segment
    assert (last.status, last.stop_reason) == ("truncated", "max_context_tokens")
    assert episode.tokens > 12


def test_an_environment_that_can_refuse_goes_on_in_a_shorter_conversation():
    class Compacting(Env):
        refused = ()

        async def refuse(self, why, too_long):
            self.refused = (*self.refused, (why, too_long))
            return StepResult(observation={"role": "user", "content": "S:"}, after=-1)

    env = Compacting(say("a long result"), DONE)
    cuts, episode = play(env, Script("abcdefgh$", "ij$"), max_context_tokens=12, max_trajectory_tokens=40)
    assert env.refused == (("a branch has at most 12 tokens", True),)
    assert (episode.status, text_of(cuts)) == ("finished", "Q:abcdefgh$S:ij$")


def test_a_first_prompt_that_is_too_long_for_a_branch_is_refused_too():
    class Compacting(Env):
        async def reset(self, data):
            return [{"role": "user", "content": "a very long prompt"}]

        async def refuse(self, why, too_long):
            assert (why, too_long) == ("a branch has at most 12 tokens", True)
            return StepResult(observation={"role": "user", "content": "S:"}, after=-1, tools=[])

    bounds = {"max_context_tokens": 12, "max_trajectory_tokens": 40}
    cuts, episode = play(Compacting(DONE), Script("ij$"), **bounds)
    assert (episode.status, text_of(cuts)) == ("finished", "S:ij$")
    plain, _ = play(Env(DONE, reset=lambda: answer([{"role": "user", "content": "a very long prompt"}])),
                    Script(), **bounds)  # fmt: skip
    assert "first prompt of 18 tokens leaves no room for an answer; max_context_tokens is 12" in (
        plain[-1].segment.error
    )


@pytest.mark.parametrize("limit", [0, True, "9", 2.5])
def test_a_bound_that_is_none_fails_the_episode(limit):
    class Bounded(Env):
        def turn_limit(self):
            return limit

    cuts, episode = play(Bounded(DONE), Script("a"))
    assert (episode.status, "turn_limit returned" in cuts[-1].segment.error) == ("failed", True)


def test_turns_alternate_and_rewards_stay_with_their_turn():
    env = Env(say("7", step=0.5), DONE)
    script = Script("4+3$", "=7$")
    cuts, episode = play(env, script)
    assert text_of(cuts) == "Q:4+3$|7=7$"
    assert env.actions == ["4+3", "=7"]
    assert [(r.name, r.turn, r.value) for c in cuts for r in c.segment.rewards] == [
        ("step", 1, 0.5), ("score", 3, 1.0),
    ]  # fmt: skip
    last = cuts[-1].segment
    assert (last.status, last.stop_reason, last.trajectory_id) == ("finished", "stop", "t.2")
    assert last.extra == {"correct": True, "info": {"why": "ok"}}
    assert env.closed == 1
    assert env.data == {"index": 3}
    assert episode.status == "finished"
    assert bytes(script.requests[1].prompt) == b"Q:4+3\0|7"


def test_several_messages_become_one_observation():
    both = StepResult(observation=[{"role": "tool", "content": "7"}, {"role": "tool", "content": "8"}])
    cuts, episode = play(Env(both, DONE), Script("1+2$", "3$"))
    assert (text_of(cuts), episode.status) == ("Q:1+2$|7|83$", "finished")


def test_tools_of_the_environment_reach_the_template_and_its_actions_keep_special_tokens():
    class Tooled(Env):
        def tool_schemas(self):
            return [{"type": "function", "function": {"name": "add"}}]

    text, plain = Letters(), Letters()
    play(Tooled(say("7"), DONE), Script("1$", "2$"), text=text)
    assert [[tool["function"]["name"] for tool in tools] for tools in text.tools] == [["add"], ["add"]]
    play(Env(DONE), Script("1$"), text=plain)
    assert (text.kept, plain.kept, plain.tools) == (True, False, [[]])


def test_versions_of_a_turn_in_pieces_are_kept():
    cuts, _ = play(Env(DONE), Script(["ab", "c$"]))
    assert cuts[0].arrays["policy_version"].tolist() == [-1, -1, 0, 0, 1, 1]


def test_a_turn_cut_by_length_is_closed_before_the_next_observation():
    env = Env(say("go"), DONE)
    cuts, _ = play(env, Script("abcdef", "x$"), max_turn_tokens=4)
    assert text_of(cuts) == "Q:abcd$|gox$"
    assert env.actions[0] == "abcd"
    mask = np.concatenate([c.arrays["action_mask"] for c in cuts]).tolist()
    # The policy did not sample the end token that was added.
    assert mask == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert cuts[0].segment.stop_reason == "length"


def test_the_turn_limit_truncates():
    cuts, _ = play(Env(say("a"), say("b")), Script("1$", "2$"), Bounds(max_turns=2))
    assert (cuts[-1].segment.status, cuts[-1].segment.stop_reason) == ("truncated", "max_turns")
    # No turn follows the last observation, so it is left out.
    assert text_of(cuts) == "Q:1$|a2$"


def test_the_token_limit_truncates_before_an_observation_that_leaves_no_room():
    cuts, _ = play(Env(say("long observation")), Script("1$"), max_trajectory_tokens=12)
    assert (cuts[-1].segment.status, cuts[-1].segment.stop_reason) == ("truncated", "max_trajectory_tokens")
    assert text_of(cuts) == "Q:1$"


def test_the_room_left_bounds_a_turn():
    script = Script("1$", "abcdefgh")
    cuts, _ = play(Env(say("x"), say("y")), script, max_trajectory_tokens=10)
    assert [r.max_tokens for r in script.requests] == [8, 4]
    assert sum(c.segment.tokens for c in cuts) == 10
    assert cuts[-1].segment.status == "truncated"


async def answer(value):
    return value


@pytest.mark.parametrize(
    ("env", "script", "error"),
    [
        (Env(ValueError("boom")), Script("1$"), "ValueError: boom in tests/"),
        (Env(StepResult(rewards={"r": float("nan")}, done=True)), Script("1$"), "reward 'r' is nan"),
        (Env(StepResult(rewards={"r": "x"}, done=True)), Script("1$"), "'x', not a number"),
        (Env(StepResult()), Script("1$"), "neither an observation nor done"),
        (Env(StepResult(observation=[])), Script("1$"), "neither an observation nor done"),
        (
            Env(StepResult(observation=[{"role": "tool"}])),
            Script("1$"),
            "step returned [{'role': 'tool'}]; it must be",
        ),
        (Env(StepResult(done=True, rewards={})), Script(TurnRefused("too long")), "too long"),
        (Env(lambda: answer("done")), Script("1$"), "step returned 'done', not a StepResult"),
        (Env(DONE, reset=lambda: answer("Q")), Script("1$"), "reset returned 'Q'; it must be a list of"),
        (
            Env(DONE, reset=lambda: answer([{"role": "user", "content": "a\ud83d"}])),
            Script("1$"),
            r"reset: character 2 of a message is '\ud83d', half of a surrogate pair",
        ),
        (Env(SystemExit(3)), Script("1$"), "raised SystemExit(3) in"),
        (Env(DONE), Script(""), "without a token"),
        (Env(TimeoutError("its own")), Script("1$"), "TimeoutError: its own"),
    ],
)
def test_what_breaks_down_is_recorded_as_failed(env, script, error):
    cuts, episode = play(env, script)
    last = cuts[-1].segment
    assert last.status == "failed"
    assert error in last.error
    assert last.rewards == []
    assert env.closed == 1
    assert episode.status == "failed"


def test_an_error_of_user_code_names_its_file_and_line():
    cuts, _ = play(Env(ValueError("boom")), Script("1$"))
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.strip() == "raise step")
    assert cuts[-1].segment.error == f"ValueError: boom in tests/unit/actors/test_episode.py:{line}"


def test_an_episode_that_lost_its_generators_is_given_back_and_not_recorded():
    """L3: a task burned one of its attempts when the generator died under it."""
    env = Env(DONE)
    with pytest.raises(Infrastructure, match="5 attempts failed"):
        play(env, Script(GenerationFailed("5 attempts failed")))
    assert env.closed == 1


def test_an_end_that_cannot_be_sent_is_an_error_and_no_open_trajectory():
    async def emit(cuts):
        if cuts[-1].segment.status != "unfinished":
            raise ProtocolError("header of 300000 bytes, at most 262144")

    class Suite:
        def episode(self):
            return Env(DONE)

    lease = LeaseTask(lease_id="l", attempt=0, task=Task(task_id="t", env="e", group_id="g", group_size=1))
    with pytest.raises(ProtocolError, match="300000"):
        run(lease, Suite(), Script("1$"), Bounds(), emit)


class Plain:
    """An environment of plain functions."""

    closed = 0

    def __init__(self, step):
        self._step = step

    def reset(self, data):
        return [{"role": "user", "content": "Q:"}]

    def step(self, action):
        return self._step()

    def close(self):
        self.closed += 1


def test_an_environment_may_have_plain_functions_and_they_may_block():
    """U10: a reward that blocked stopped the whole actor."""
    threads = []

    def step():
        threads.append(threading.current_thread())
        return DONE

    env = Plain(step)
    cuts, _ = play(env, Script("1$"))
    assert cuts[-1].segment.status == "finished"
    assert threads[0] is not threading.main_thread()
    assert env.closed == 1


def test_a_plain_function_that_hangs_is_given_up_with_its_line():
    hang = threading.Event()

    def step():
        hang.wait(60)
        return DONE

    cuts, _ = play(Plain(step), Script("1$"), Bounds(env_timeout_s=2.0))
    hang.set()
    error = cuts[-1].segment.error
    assert "step took longer than env_timeout_s = 2 s; it stands in" in error
    assert f"{__file__}:{step.__code__.co_firstlineno + 1} in step" in error


def test_tokens_sampled_before_a_failure_are_recorded():
    cuts, _ = play(Env(say("a"), ValueError("boom")), Script("1$", "2$"))
    assert text_of(cuts) == "Q:1$|a2$"


async def forever():
    await asyncio.Event().wait()


def test_an_environment_that_hangs_is_given_up():
    for env in (Env(reset=forever), Env(forever)):
        cuts, _ = play(env, Script("1$"), Bounds(env_timeout_s=0.02))
        assert "longer than env_timeout_s" in cuts[-1].segment.error


def test_the_deadline_of_the_task_holds():
    cuts, _ = play(Env(forever), Script("1$"), deadline_s=0.02)
    assert "deadline of 0.02 s" in cuts[-1].segment.error


def test_the_wait_for_credit_does_not_count_for_the_deadline():
    cuts = []

    async def emit(new):
        cuts.extend(new)
        await asyncio.sleep(0.2)

    class Suite:
        def episode(self):
            return Env(DONE)

    sampling = Sampling(max_turn_tokens=16, max_trajectory_tokens=64)
    task = Task(task_id="t", env="e", group_id="g", group_size=1, deadline_s=0.6, sampling=sampling)
    lease = LeaseTask(lease_id="l", attempt=0, task=task)
    bounds = Bounds(segment_tokens=2)
    run(lease, Suite(), Script("1234567$"), bounds, emit)
    assert [cut.segment.index for cut in cuts] == list(range(len(cuts)))
    assert sum(cut.segment.tokens for cut in cuts) == 10
    assert (len(cuts), cuts[-1].segment.status) == (5, "finished")


def test_a_prompt_without_room_for_an_answer_is_refused_with_the_figures():
    cuts, _ = play(Env(DONE), Script("1$"), max_trajectory_tokens=2)
    assert "first prompt of 2 tokens" in cuts[-1].segment.error


def test_cancellation_passes_through_and_closes_the_environment():
    begun = asyncio.Event()

    env = Env()

    async def main():
        loop, cuts = asyncio.get_running_loop(), []

        async def begin():
            loop.call_soon_threadsafe(begun.set)
            await forever()

        env.steps.append(begin)
        runner = EnvironmentRunner(calls=1)

        async def emit(new):
            cuts.extend(new)

        class Suite:
            def episode(self):
                return env

        task = Task(task_id="t", env="e", group_id="g", group_size=1)
        lease = LeaseTask(lease_id="l", attempt=0, task=task)
        episode = Episode(lease, Suite(), Letters(), Script("1$"), Bounds(), emit, runner, way_of_playing)
        running = asyncio.create_task(episode.run())
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        runner.close()
        assert cuts == []

    asyncio.run(main())
    assert env.closed == 1


def test_info_that_cannot_travel_is_replaced_by_a_note():
    assert bounded({"a": [1]}) == {"a": [1]}
    assert "cannot be encoded" in bounded({"a": object()})["left_out"]
    assert "cannot be encoded" in bounded({"a": 2**70})["left_out"]
    assert "at most" in bounded({"a": "x" * 40_000})["left_out"]


@pytest.mark.parametrize(
    "rewards", [{"r" * 257: 1.0}, {f"r{n}": 1.0 for n in range(4097)}], ids=["long", "many"]
)
def test_rewards_that_no_segment_can_carry_are_refused_here(rewards):
    with pytest.raises(EnvironmentFailed, match="rewards are at most"):
        finite_rewards(StepResult(rewards=rewards))


def test_infinite_rewards_are_named():
    with pytest.raises(EnvironmentFailed, match="'r' is inf"):
        finite_rewards(StepResult(rewards={"r": float("inf")}))


IN_STEP = Bounds(segment_tokens=4, in_step=True)


def versions(script):
    return [(r.min_policy_version, r.max_tokens, r.begun) for r in script.requests]


def test_in_step_a_turn_stops_at_the_end_of_each_segment_and_waits_for_the_next_version():
    # The prompt takes two tokens of the first segment.
    script = Script("ab", "cdef", "g$")
    cuts, _ = play(Env(DONE), script, IN_STEP)
    assert text_of(cuts) == "Q:abcdefg$"
    assert [(cut.segment.tokens, cut.segment.status) for cut in cuts] == [
        (4, "unfinished"), (4, "unfinished"), (2, "finished"),
    ]  # fmt: skip
    assert versions(script) == [(0, 2, 0), (1, 4, 2), (1, 4, 6)]
    assert bytes(script.requests[2].prompt) == b"Q:abcdef"


def test_in_step_a_turn_that_ends_with_its_segment_is_closed_there():
    script = Script("ab")
    cuts, _ = play(Env(DONE), script, IN_STEP, max_turn_tokens=2)
    assert [(cut.segment.tokens, cut.segment.status) for cut in cuts] == [(4, "finished")]
    assert cuts[0].segment.rewards[0].value == 1.0


def test_in_step_the_next_turn_waits_for_the_next_version_and_context_without_tokens_does_not():
    env = Env(say("123456"), DONE)
    script = Script("a$", "b", "$")
    cuts, _ = play(env, script, IN_STEP)
    assert text_of(cuts) == "Q:a$|123456b$"
    assert [(cut.segment.tokens, cut.segment.action_tokens) for cut in cuts] == [
        (4, 2),
        (4, 0),
        (4, 1),
        (1, 1),
    ]
    assert [r.min_policy_version for r in script.requests] == [0, 1, 1]


def test_evaluations_do_not_wait_in_step():
    script = Script("abcdef$")
    env, emitted = Env(DONE), []

    async def emit(new):
        emitted.extend(new)

    class Suite:
        def episode(self):
            return env

    task = Task(
        task_id="t", env="e", group_id="g", group_size=1, purpose="eval",
        sampling=Sampling(max_turn_tokens=16, max_trajectory_tokens=64),
    )  # fmt: skip
    lease = LeaseTask(lease_id="l", attempt=0, task=task)
    run(lease, Suite(), script, IN_STEP, emit)
    assert versions(script) == [(0, 16, 0)]


def test_the_closing_segment_of_a_failed_episode_carries_the_failure():
    cuts, _ = play(Env(KeyError("answer")), Script("a$"))
    last = cuts[-1].segment
    assert (last.status, last.failure.kind, last.failure.message) == ("failed", "KeyError", "'answer'")
    assert last.failure.place.startswith("tests/unit/actors/test_episode.py:")
    assert last.error == f"KeyError: 'answer' in {last.failure.place}"


def test_the_wait_for_the_first_token_does_not_count_for_the_deadline():
    """Check the deadline in lockstep, where the first token waits for the learner's step."""

    class Late(Script):
        async def turn(self, request):
            await asyncio.sleep(0.4)
            async for sampled in super().turn(request):
                yield sampled

    cuts, _ = play(Env(DONE), Late("1$"), deadline_s=0.3)
    assert cuts[-1].segment.status == "finished"


def test_a_turn_ends_with_the_token_that_completes_a_stop_string():
    env, script = Env(say("7"), DONE), Script(["4+", "3\nOb", "s: 8$"], "=7$")
    cuts, _ = play(env, script, stop=["?", "\nObs:"])
    assert text_of(cuts) == "Q:4+3\nObs:$|7=7$", "the template closes the turn, the rest was never there"
    assert env.actions == ["4+3", "=7"]
    reasons = [cut.segment.stop_reason for cut in cuts if cut.segment.action_tokens]
    assert reasons == ["stop", "stop"]
    masked = [list(c.arrays["token_ids"][c.arrays["action_mask"] == 1]) for c in cuts]
    assert masked[0] == [ord(c) for c in "4+3\nObs:"], "the string is an action, and trained"


def test_the_text_keeps_the_stop_string_if_it_is_asked_for():
    env = Env(DONE)
    play(env, Script("<a>1</a>2$"), stop=["</a>"], include_stop=True)
    assert env.actions == ["<a>1</a>"]


def test_a_stop_string_may_lie_across_the_windows_of_lockstep():
    env = Env(DONE)
    cuts, _ = play(env, Script("ab", "cd", "ef"), Bounds(segment_tokens=4, in_step=True), stop=["bcd"])
    assert (env.actions, text_of(cuts)) == (["a"], "Q:abcd")
    assert cuts[-1].segment.stop_reason == "stop"


def test_without_a_stop_string_in_the_text_a_turn_ends_as_ever():
    env = Env(DONE)
    cuts, _ = play(env, Script("abcdefgh"), max_turn_tokens=4, stop=["ef", "x"])
    assert (env.actions, cuts[-1].segment.stop_reason) == (["abcd"], "length")


def test_a_stop_string_that_ends_with_the_longest_turn_is_a_stop():
    env = Env(DONE)
    cuts, _ = play(env, Script("abcdefgh"), max_turn_tokens=4, stop=["cd"])
    assert (env.actions, cuts[-1].segment.stop_reason) == (["ab"], "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stop_string_of_many_bytes_is_found_wherever_tokens_part_it(size):
    """Tokens of single bytes: a character is complete only with its last byte."""
    text = "x" * 40 + "näh → STÖP, then more"
    tokens, stop = list(text.encode()), ["→ STÖP"]

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    end = len(text[: text.index(",")].encode())
    for begin in range(0, len(tokens), size):
        found = stopped_at(tokens[: begin + size], begin, stop, decode)
        if found is not None:
            break
    assert found == end
    assert begin < end <= begin + size


def turns_of(cuts):
    return [
        (turn.index, turn.start, turn.end, turn.action, turn.back)
        for cut in cuts
        for turn in cut.segment.turns
    ]


def test_an_observation_behind_an_earlier_answer_is_a_branch():
    back = StepResult(observation={"role": "user", "content": "B"}, after=0)
    anew = StepResult(observation={"role": "user", "content": "N:"}, after=-1, auxiliary=[2])
    done = StepResult(done=True, auxiliary=[2])
    script = Script("1$", "2$", "3$", "4$")
    cuts, episode = play(Env(say("a"), back, anew, done), script)
    assert episode.status == "finished"
    assert [bytes(request.prompt) for request in script.requests] == [
        b"Q:", b"Q:1\0|a", b"Q:1\0|B", b"N:",
    ]  # fmt: skip
    assert text_of(cuts) == "Q:1$|a2$|B3$N:4$"
    assert [(index, back) for index, _, _, _, back in turns_of(cuts)] == [
        (0, 1), (1, 1), (2, 1), (3, 1), (4, 3), (5, 1), (6, 0), (7, 1),
    ]  # fmt: skip
    assert cuts[-1].segment.auxiliary == [5], "the third answer is turn 5"
    assert episode.tokens == sum(cut.segment.tokens for cut in cuts)


def test_a_new_conversation_with_the_tokens_of_an_earlier_one_goes_on_there():
    """An agent may spell a message in another way that the template writes alike."""
    anew = StepResult(observation={"role": "user", "content": "Q:1\0|more"}, after=-1)
    script = Script("1$", "2$")
    cuts, _ = play(Env(anew, DONE), script)
    assert bytes(script.requests[1].prompt) == b"Q:1\0|more"
    assert text_of(cuts) == "Q:1$|more2$", "the tokens that are known are not sent again"
    assert [turn[4] for turn in turns_of(cuts)] == [1, 1, 1, 1]


def test_a_branch_has_the_tools_of_its_conversation_and_all_branches_share_one_limit():
    class Tooled(Env):
        def tool_schemas(self):
            return ["first"]

    text = Letters()
    anew = StepResult(observation={"role": "user", "content": "N:"}, after=-1, tools=["other"])
    back = StepResult(observation={"role": "user", "content": "B"}, after=0)
    behind = StepResult(observation={"role": "user", "content": "C"}, after=1)
    cuts, _ = play(
        Tooled(anew, back, behind, DONE),
        Script("1$", "2$", "3$", "456789"),
        text=text,
        max_trajectory_tokens=20,
    )
    assert text.tools == [["first"], ["other"], ["first"], ["other"]]
    assert sum(cut.segment.tokens for cut in cuts) == 20, (
        "the last answer is cut at the limit of all branches"
    )


def test_an_answer_that_is_not_there_is_named():
    cuts, _ = play(Env(StepResult(observation={"role": "user", "content": "B"}, after=1)), Script("1$"))
    assert "after = 1 of 1 answers" in cuts[-1].segment.error


def test_a_turn_of_a_branch_that_a_segment_cuts_keeps_its_place():
    back = StepResult(observation={"role": "user", "content": "long one"}, after=0)
    cuts, _ = play(Env(say("a"), back, DONE), Script("1$", "2$", "3$"), Bounds(segment_tokens=3))
    joined = {}
    for index, start, end, _, back_ in turns_of(cuts):
        joined.setdefault(index, [start, end, {back_}])
        joined[index][1] = end
        joined[index][2].add(back_)
    assert joined[4][2] == {3}
    assert joined[4][1] - joined[4][0] == len("|long one")


def test_marks_stay_with_their_turn_and_a_bad_one_fails_the_episode():
    cuts, _ = play(Env(replace(say("7"), marks={"anchor": "a", "calls": 1}), DONE), Script("4+3$", "=7$"))
    assert [(m.name, m.turn, m.value) for c in cuts for m in c.segment.marks] == [
        ("anchor", 1, "a"), ("calls", 1, 1.0),
    ]  # fmt: skip
    cuts, episode = play(Env(replace(say("7"), marks={"anchor": None})), Script("4+3$"))
    assert (episode.status, cuts[-1].segment.status) == ("failed", "failed")
    assert "mark 'anchor' is None" in cuts[-1].segment.error
