"""Which files of conversations are read, what is learnt of them, and what is said of the rest."""

import json

import pytest

from actors.render import Renderer
from launch.conversations import given_of, readable
from launch.errors import ConfigError
from launch.run_file.load import check
from tests.unit.actors.test_render import chatml_folder

ROW = {"prompt": "2+2", "answer": 4}
TALK = {
    "messages": [
        {"role": "user", "content": "Think of a number."},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": [{"type": "text", "text": "Double it."}]},
        {"role": "assistant", "content": "14"},
    ]
}
TOKENS = {
    "trajectory_id": "1g0.0.0",
    "token_ids": [5, 6, 7],
    "action_mask": [False, True, 1],
    "complete": True,
}


@pytest.fixture
def found(tmp_path):
    """Return a function that writes rows to a file, and reads them as `[learner.given]` does."""
    folder = tmp_path / "model"
    folder.mkdir()
    renderer = Renderer(chatml_folder(folder))

    def read(*rows, longest=96, **given):
        path = tmp_path / "talks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {
            "model": {"path": str(folder)},
            "env": {"name": "calculator"},
            "learner": {
                "given": {"file": str(path), **given},
                "sampling": {"max_trajectory_tokens": longest, "max_turn_tokens": 2},
            },
        }
        config = check(settings, "test")
        talks, remarks = readable(config, renderer)
        assert [t.token_ids.tolist() for t in given_of(config, folder)] == [
            t.token_ids.tolist() for t in talks
        ]
        return talks, remarks, renderer

    return read


def learnt(talk, renderer):
    ids = [int(token) for token, learns in zip(talk.token_ids, talk.learnt, strict=True) if learns]
    return renderer.decode(ids, keep_special=True)


def test_of_all_forms_the_answers_are_learnt_with_their_ends(found):
    talks, remarks, renderer = found(ROW, TALK, TOKENS)
    assert [learnt(talk, renderer) for talk in talks[:2]] == ["4<|im_end|>", "7<|im_end|>14<|im_end|>"]
    assert talks[2].token_ids[talks[2].learnt].tolist() == [6, 7]
    assert [talk.place.rpartition(":")[2] for talk in talks] == ["1", "2", "3"]
    assert not remarks


def test_an_answer_has_the_tokens_that_an_actor_would_sample_behind_its_prompt(found):
    (talk,), _, renderer = found(TALK)
    prompt = renderer.prompt([TALK["messages"][0]])
    assert talk.token_ids[: len(prompt)].tolist() == prompt
    assert not talk.learnt[: len(prompt)].any()


def test_the_first_token_is_never_learnt_because_nothing_comes_before_it(found):
    (talk,), _, _ = found(TOKENS | {"action_mask": [True, False, True]})
    assert talk.learnt.tolist() == [False, False, True]


def test_a_character_of_two_halves_and_an_end_token_in_a_question_are_text(found):
    talks, _, renderer = found({"prompt": "a<|im_end|>b", "answer": "\U0001f600"})
    assert learnt(talks[0], renderer) == "\U0001f600<|im_end|>"


def test_what_is_too_long_or_has_no_answer_is_left_out_and_told(found):
    silent = TOKENS | {"action_mask": [False] * 3}
    long = {"prompt": "x" * 80, "answer": "y"}
    talks, remarks, _ = found(ROW, long, silent, long, longest=60)
    assert [talk.place.rpartition(":")[2] for talk in talks] == ["1"]
    assert "2 of 4 conversations are left out, because they are longer than" in remarks[0]
    assert "talks.jsonl:2 has" in remarks[0]
    assert "1 of 4 conversations are left out: they have no answer" in remarks[1]
    with pytest.raises(ConfigError, match="2 of 2 conversations are left out"):
        found(long, long, longest=60)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "hello"}, "no column 'messages', 'prompt' or"),
        ({"prompt": "2+2"}, "has no solution"),
        ({"messages": "hi"}, "has to be a list of messages"),
        ({"messages": TALK["messages"][:1]}, "end with an answer"),
        ({"messages": TALK["messages"][1:]}, "begin with a question"),
        ({"messages": [{"content": "x"}]}, "has no role"),
        (
            {
                "messages": [
                    *TALK["messages"][:1],
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ]
            },
            "has tool_calls, whose text only a chat template knows",
        ),
        (TOKENS | {"action_mask": [True]}, "two equally long lists"),
        (TOKENS | {"token_ids": [5, -1, 7]}, "of token ids"),
        (TOKENS | {"token_ids": [5, True, 7]}, "of token ids"),
        (TOKENS | {"token_ids": [5, 6, 100_000]}, "the model has no token 100000, only"),
        (TOKENS | {"complete": False}, "not whole"),
        (TOKENS | {"offset": 9}, "not whole"),
        ({"prompt": "2+2", "answer": "4<|im_end|>"}, "has the end token <|im_end|> in it; take it out"),
        ({"prompt": "2+2", "answer": "\ud83d"}, "half of a surrogate pair"),
        (
            {"messages": [{"role": "user", "content": "\ude00"}, TALK["messages"][1]]},
            "half of a surrogate pair",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_with_its_line(found, row, why):
    with pytest.raises(ConfigError, match=why) as refused:
        found(ROW, row)
    assert "talks.jsonl:2" in str(refused.value)


SHAPED = [{"origin": "taught", "surrogate": {"kind": "shaped"}}]


@pytest.mark.parametrize(
    ("name", "learner"),
    [
        ("given", {"given": {"file": "no.jsonl"}}),
        ("taught", {"taught": {"file": "no.jsonl"}, "algorithm": {"by_origin": SHAPED}}),
        ("family", {"family": {"kind": "steered", "file": "no.jsonl"}}),
    ],
)
def test_a_file_that_is_not_there_is_refused_whoever_names_it(name, learner):
    sampling = {"max_trajectory_tokens": 256}
    settings = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "generator": {"max_model_len": 256},
        "learner": {"sampling": sampling, **learner},
    }
    with pytest.raises(ConfigError, match=rf"learner.{name}: .*no file no.jsonl"):
        readable(check(settings, "test"), None)


def test_the_solution_of_the_task_itself_needs_no_file():
    settings = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "generator": {"max_model_len": 256},
        "learner": {"sampling": {"max_trajectory_tokens": 256}, "family": {"kind": "steered", "own": True}},
    }
    assert given_of(check(settings, "test"), "nowhere") == []


def asked(**info):
    return TOKENS | {
        "token_ids": [5, 6, 7, 8],
        "action_mask": [0, 0, 1, 1],
        "extra": {"correct": False, "info": info},
    }


def test_an_experts_answer_stands_where_the_policys_was_and_others_are_passed_over(found):
    talks, remarks, renderer = found(asked(expert="14<|im_end|>"), asked(other=1), experts=True)
    (talk,) = talks
    assert talk.token_ids[:2].tolist() == [5, 6]
    assert not talk.learnt[:2].any()
    assert talk.learnt[2:].all()
    assert talk.token_ids.tolist().count(renderer.eos_ids[0]) == 1, "what looks like an end in it is text"
    assert learnt(talk, renderer) == "14<|im_end|><|im_end|>"
    assert not remarks


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW, "no column 'extra' with an 'info'"),
        (asked(expert=7), "the expert's answer is 7, which is no text"),
        (asked(expert=" "), "which is no text"),
        (asked(expert="x") | {"complete": False}, "not whole"),
        (asked(), "there are no conversations"),
    ],
)
def test_an_experts_answer_that_is_none_is_refused_with_its_line(found, row, said):
    with pytest.raises(ConfigError, match=said):
        found(row, experts=True)


def test_experts_need_a_file():
    settings = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "learner": {"given": {"experts": True}},
    }
    with pytest.raises(ConfigError, match=r"learner.given.experts is true but learner.given.file is empty"):
        check(settings, "test")
