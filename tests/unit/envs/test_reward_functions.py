"""Reward functions as users have them: `(answer, row)`, and TRL's form with the functions of its documentation."""

import asyncio
import math
import sys
import textwrap

import pytest

from actors.environments import EnvironmentRunner
from actors.errors import EnvironmentFailed
from envs.errors import EnvError
from envs.rows.reading import DataRow
from envs.rows.reward_functions import load_reward_functions
from envs.rows.suite import RowsSuite

COLUMNS = ("prompt", "answer", "ground_truth", "task")
ROW = DataRow("train.jsonl:1", {"prompt": "p", "answer": "4", "ground_truth": "4", "task": "math"})
TALK = [{"role": "user", "content": "p"}]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that writes a file of reward functions and loads one, or several."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(code, reward="rewards.py:reward"):
        (tmp_path / "rewards.py").write_text(textwrap.dedent(code))
        return load_reward_functions(reward, COLUMNS, "train.jsonl")

    return make


def value(functions, answer, prompt="p", row=ROW):
    (function,) = functions
    return function.value(function.call(answer, row, prompt))


def test_answer_and_row(load):
    assert value(load("def reward(answer, row): return answer == row['answer']"), "4") == 1.0
    assert value(load("def reward(answer): return len(answer)"), "four") == 4.0
    assert value(load("def reward(answer, row): return None"), "4") is None
    assert load("def reward(answer): return 0.0")[0].name == "reward"


def test_trl_ground_truth(load):
    functions = load(
        """
        import re

        def reward_func(completions, ground_truth, **kwargs):
            # Regular expression to capture content inside \\\\boxed{}
            matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
            contents = [match.group(1) if match else "" for match in matches]
            # Reward 1 if the content is the same as the ground truth, 0 otherwise
            return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
        """,
        "rewards.py:reward_func",
    )
    assert value(functions, r"so \boxed{4}") == 1.0
    assert value(functions, "4") == 0.0


def test_trl_unique_letters_of_a_conversation(load):
    functions = load(
        """
        def reward_num_unique_letters(completions, **kwargs):
            \"\"\"Reward function that rewards completions with more unique letters.\"\"\"
            completion_contents = [completion[0]["content"] for completion in completions]
            return [float(len(set(content))) for content in completion_contents]
        """,
        "rewards.py:reward_num_unique_letters",
    )
    assert value(functions, "abba!", TALK) == 3.0


def test_a_function_for_messages_over_prompts_that_are_texts_is_told_what_it_needs(load):
    (function,) = load(
        """
        def reward(completions, **kwargs):
            return [float(completion[0]["content"] == "4") for completion in completions]
        """
    )
    with pytest.raises(
        TypeError, match=r"string indices .* needs prompts that are lists of messages"
    ) as caught:
        function.call("4", ROW, "p")
    assert caught.traceback[-1].path.name == "rewards.py"
    assert function.call("4", ROW, TALK) == [1.0]


def test_trl_think_format(load):
    functions = load(
        """
        import re

        def format_reward_func(completions, **kwargs):
            \"\"\"Reward function that checks if the completion has a specific format.\"\"\"
            pattern = r"^<think>.*?</think><answer>.*?</answer>$"
            completion_contents = [completion[0]["content"] for completion in completions]
            matches = [re.match(pattern, content) for content in completion_contents]
            return [1.0 if match else 0.0 for match in matches]
        """,
        "rewards.py:format_reward_func",
    )
    assert value(functions, "<think>a</think><answer>4</answer>", TALK) == 1.0
    assert value(functions, "4", TALK) == 0.0


def test_trl_tasks_to_which_a_function_does_not_apply(load):
    functions = load(
        """
        def math_reward_func(prompts, completions, task, **kwargs):
            rewards = []
            for prompt, completion, t in zip(prompts, completions, task):
                rewards.append(float(prompt in completion) if t == "math" else None)
            return rewards
        """,
        "rewards.py:math_reward_func",
    )
    assert value(functions, "pq") == 1.0
    other = DataRow("train.jsonl:2", {**ROW.values, "task": "coding"})
    assert value(functions, "pq", row=other) is None


def test_a_batch_form_gets_all_columns_but_the_prompt(load):
    functions = load("def reward(completions, **kwargs): print(sorted(kwargs.items())); return [len(kwargs)]")
    assert value(functions, "x") == 4.0
    exact = load("def reward(completions, answer): return [float(answer == completions)]")
    assert value(exact, "4") == 1.0


def test_a_batch_form_may_leave_the_completions_out(load):
    functions = load(
        "def reward(prompts, answer, **kwargs): return [float(prompts == ['p'] and answer == ['4'])]"
    )
    assert value(functions, "4") == 1.0


def test_numbers_of_other_libraries_are_rewards(load):
    code = "from array import array\ndef reward(completions): return array('d', [0.5])"
    assert value(load(code), "x") == 0.5


def test_a_file_runs_once_for_all_its_functions(load):
    code = (
        "runs = []\nruns.append(1)\ndef a(answer): return len(runs)\ndef b(answer): runs.append(1); return 0"
    )
    a, b = load(code, {"a": "rewards.py:a", "b": "rewards.py:b"})
    b.call("", ROW, "p")
    assert a.value(a.call("", ROW, "p")) == 2.0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "def reward(x, y): return 0",
            r"rewards\.py:1: reward\(x, y\): a reward function takes \(answer, row\), or",
        ),
        ("def reward(answer, /): return 0", r"rewards\.py:1: reward\(answer, /\): a reward function takes"),
        (
            "\ndef reward(answer, truth): return 0",
            r"rewards\.py:2: reward: it needs 'truth', but a function of this",
        ),
        (
            "def reward(completions, ground_thruth): return [0]",
            r"needs 'ground_thruth', but train\.jsonl has no such column; did you mean 'ground_truth'\?",
        ),
        (
            "def reward(completions, completion_ids): return [0]",
            "needs 'completion_ids', but an environment knows",
        ),
        (
            "def reward(completions_ids, **kwargs): return [0]",
            "needs 'completions_ids', but an environment knows",
        ),
        (
            "def reward(completion_ids, **kwargs): return [0]",
            "needs 'completion_ids', but an environment knows",
        ),
        (
            "def reward(environments, **kwargs): return [0]",
            "needs 'environments', but only env.name = \"tools\" has",
        ),
        (
            "def reward(completions, trainer_state): return [0]",
            "needs 'trainer_state', which is TRL's trainer's",
        ),
        ("def reward(answer): return 1 +", r"rewards\.py:1: SyntaxError"),
    ],
)
def test_a_wrong_signature_is_refused_with_file_and_line(load, code, said):
    with pytest.raises(EnvError, match=said) as caught:
        load(code)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def reward(answer): return 'good'", "returned 'good'; a reward is a finite number or None"),
        ("def reward(answer): return '1'", "returned '1'; a reward is a finite number or None"),
        ("def reward(answer): return float('nan')", "returned nan; a reward is a finite number"),
        (
            "def reward(completions): return 0.5",
            "returned 0.5; for one completion it has to return a list of one",
        ),
        ("def reward(completions): return []", r"returned \[\]; for one completion"),
        ("def reward(completions): return [float('inf')]", "returned inf"),
    ],
)
def test_a_result_that_is_no_reward_names_the_function(load, code, said):
    with pytest.raises(EnvError, match=said) as caught:
        value(load(code), "x")
    assert str(caught.value).startswith("rewards.py:1: reward ")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Return a function that makes a suite of one row with the functions of a file."""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(code, reward, **params):
        (tmp_path / "rewards.py").write_text(textwrap.dedent(code))
        (tmp_path / "train.jsonl").write_text('{"prompt": "p", "answer": "4"}\n')
        return RowsSuite("train.jsonl", reward, heldout=0.0, **params)

    return make


def answered(suite, text, timeout_s=60.0):
    """Answer as an actor does: functions in threads, coroutines in the loop of environments."""

    async def play():
        runner, env = EnvironmentRunner(calls=2), suite.episode()
        try:
            await runner.call(env.reset, {"index": 0, "split": "train"}, what="reset", timeout_s=60.0)
            return await runner.call(env.step, text, what="step", timeout_s=timeout_s)
        finally:
            runner.close()

    return asyncio.run(play())


BOTH = """
import asyncio
import threading

def blocking(answer, row):
    return float(threading.current_thread() is not threading.main_thread())

async def judged(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return [float(c == a) for c, a in zip(completions, answer)]

def never(answer):
    return None
"""


def test_functions_that_block_and_functions_that_await_act_together(rows):
    table = {"judged": "rewards.py:judged", "blocking": "rewards.py:blocking", "never": "rewards.py:never"}
    result = answered(rows(BOTH, table), "4")
    assert result.rewards == {"judged": 1.0, "blocking": 1.0}
    assert result.correct is None, "several rewards, and nobody says which one decides"
    assert answered(rows(BOTH, table, correct="judged"), "4").correct is True
    assert answered(rows(BOTH, table, correct="judged"), "5").correct is False
    assert answered(rows(BOTH, table, correct="never"), "5").correct is None
    assert answered(rows(BOTH, table, correct="blocking", solved_at=1.5), "4").correct is False


def test_a_row_without_any_reward_is_an_error(rows):
    with pytest.raises(
        EnvError, match=r"train\.jsonl:1: every reward function returned None \(rewards\.py:12: never"
    ):
        answered(rows(BOTH, "rewards.py:never"), "4")
    assert math.isfinite(answered(rows(BOTH, "rewards.py:judged"), "4").rewards["judged"])


def test_a_function_that_blocks_past_its_deadline_is_named_with_its_line(rows):
    code = "import threading\n\n\ndef slow(answer):\n    threading.Event().wait(600)\n    return 0.0\n"
    with pytest.raises(EnvironmentFailed, match=r"took longer than .*; it stands in .*rewards\.py:5"):
        answered(rows(code, "rewards.py:slow"), "4", timeout_s=2.0)


@pytest.mark.parametrize(
    ("values", "right"),
    [
        ({"ground_truth": "4", "data_source": "sums"}, 1.0),
        ({"reward_model": {"style": "rule", "ground_truth": "4"}, "data_source": "sums"}, 1.0),
        ({"ground_truth": "5", "data_source": "sums"}, 0.0),
    ],
)
def test_a_function_in_verls_form_runs_unchanged(load, values, right):
    functions = load(
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            assert data_source == "sums"
            return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
        """,
        "rewards.py:compute_score",
    )
    assert functions[0].place == "rewards.py:2: compute_score"
    assert value(functions, "4", row=DataRow("t:1", values)) == right
    with pytest.raises(EnvError, match="has no ground_truth"):
        value(functions, "4", row=DataRow("t:1", {}))
