"""Whoever reads text of a model takes time that grows with its length, and not with its square.

Each hostile text is made in two sizes, one four times the other. The time of the larger one is bounded by a multiple of
the time of the smaller one. A reader of square time takes sixteen times as long, one of cubic time sixty-four times.
"""

import re
import time
from collections.abc import Callable

import pytest

from actors.env_results import check_tools
from envs.calls import find_calls, read_answer, thought_of, without_thought
from envs.gym.suite import finder
from envs.gym.textworld import command_in
from envs.reasoning_gym_suite import found_by
from envs.rows.judge import score_in
from learner.families.branching import kept_steps
from learner.families.judging import scores_in

SIZE, FACTOR = 16_000, 4
MOST = 9.0
"""Times as long that four times the text may take; 4 is linear, 16 is quadratic."""
FLOOR_S = 0.004
"""Times below this one are noise. A reader that stays below it for the larger text is fast enough."""

TOOLS = {"x": {"function": {"name": "x", "parameters": {"properties": {"a": {"type": "string"}}}}}}
PIECES = """
<tool_call>|</tool_call>|<think>|</think>|{|[|{"a":|{"name":"|{"name": "x", "arguments": {"a": "|{"name": "x",
<tool_call>{"name": "x", "arguments": {"a": 1}}|<tool_call>{"|<tool_call>x<arg_key>a</arg_key><arg_value>
<arg_key></arg_key><arg_value>|<arg_key>a</arg_key><arg_value>1</arg_value>|<function=x><parameter=a>
<tool_call><function=x><parameter=a>1</parameter>|<function=|<parameter=a>|</parameter>|</function>
to=functions.|to=functions.a|to=functions.x<MESSAGE>{|<CHANNEL>to=functions.x<MESSAGE>|<MESSAGE>|<START>|<CHANNEL>|<CALL>
[TOOL_CALLS]|[TOOL_CALLS][{"name":"x"},|[TOOL_CALLS]x[ARGS]{|<PYTHON_TAG>|<BEGIN>x<SEP>{|<BEGINS>
<BEGIN>function<SEP>x\\n```json\\n|<SEP>|a|7|7.|-|7/|keep|keep 12 |"|\\|\\"|"a":"b",|é|Score:|Score: 7/10 |<answer>|```
"""
MARKS = {"<BEGIN>": "<｜tool▁call▁begin｜>", "<BEGINS>": "<｜tool▁calls▁begin｜>", "<SEP>": "<｜tool▁sep｜>"}
FRAMES = """
{}|<tool_call>{}|<tool_call>x{}</tool_call>|<tool_call>{{{}}}</tool_call>|to=functions.{}|<think>{}|<BEGIN>{}
{{"name": "x", "arguments": {{{}|<function=x>{}</function>|[TOOL_CALLS]{}|<tool_call>{{"a": "{}"}}</tool_call>
"""
PLAIN_FRAMES = ["{}", "<think>{}", "{}\n7"]


def listed(table: str) -> list[str]:
    """Return the texts of a table, with special tokens in the place of their names, and with white space."""
    texts = [text for line in table.strip().splitlines() for text in line.split("|")]
    for name, token in MARKS.items():
        texts = [text.replace(name, token) for text in texts]
    texts = [re.sub("<([A-Z_]{4,})>", lambda m: f"<|{m[1].lower()}|>", text) for text in texts]
    return [text.replace("\\n", "\n") for text in texts]


READERS: dict[str, Callable[[str], object]] = {
    "answer without tools": lambda text: read_answer(text, {}),
    "thought": thought_of,
    "behind a thought": without_thought,
    "judge": lambda text: score_in(text, 10.0),
    "judgements": lambda text: scores_in(text, 4, 10.0),
    "reflection": kept_steps,
    "answer": lambda text: found_by(re.compile("<answer>(.*?)</answer>", re.DOTALL), text),
    "action": finder({"left": 0, "right": 1, "go north": 2}),
    "command": command_in,
}


def seconds(read: Callable[[str], object], text: str) -> float:
    """Return the CPU time of a call, the best of three."""
    taken = []
    for _ in range(3):
        begun = time.thread_time()
        read(text)
        taken.append(time.thread_time() - begun)
        if taken[-1] < FLOOR_S:
            break
    return min(taken)


def check(read: Callable[[str], object], frame: str) -> None:
    for piece in [*listed(PIECES), " ", "\n"]:
        small, large = (frame.format(piece * (size // len(piece))) for size in (SIZE, SIZE * FACTOR))
        longer = seconds(read, large)
        if longer < FLOOR_S * FACTOR:
            continue
        assert longer < MOST * max(seconds(read, small), FLOOR_S), (piece, longer)


@pytest.mark.parametrize("frame", listed(FRAMES))
def test_calls_in_four_times_the_text_take_no_more_than_a_few_times_as_long(frame):
    check(lambda text: find_calls(text, TOOLS), frame)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("frame", PLAIN_FRAMES)
def test_four_times_the_text_takes_no_more_than_a_few_times_as_long(reader, frame):
    check(READERS[reader], frame)


def test_the_case_that_stopped_an_actor_takes_a_moment():
    text = "<tool_call>x" + "<arg_key></arg_key><arg_value>" * 4_000 + "</tool_call>"
    assert seconds(lambda text: find_calls(text, TOOLS), text) < 0.5


@pytest.mark.parametrize("piece", ['{"name":', '{"name":[', '{"arguments": [{"name":'])
def test_levels_without_end_are_not_tried_one_by_one(piece):
    text = piece * (200_000 // len(piece))
    assert seconds(lambda text: find_calls(text, TOOLS), text) < 0.5


def test_space_behind_the_mark_of_a_judge_is_not_divided_in_all_ways():
    assert seconds(lambda text: score_in(text, 10.0), "Score" + " " * 100_000 + "x") < 0.5


def test_the_name_of_a_long_key_is_not_made_anew_for_each_value_behind_it():
    tool = {"function": {"parameters": {"k" * 2_000_000: {f"a{number}": 1 for number in range(100_000)}}}}
    assert seconds(lambda _: check_tools([tool], "next_requests"), "") < 1.0
