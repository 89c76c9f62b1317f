"""A request finds the answer that it follows, whatever an agent does with its conversation."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envs.agent.message_tree import Following, MessageTree

ADD = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def asked(tree, messages, answer, tools=()):
    place = tree.place(messages, list(tools))
    tree.answered(place.number, said(answer))
    return place


def test_a_window_and_a_summary_begin_anew():
    tree = MessageTree()
    talk = [SYSTEM, user("a"), said("1"), user("b")]
    asked(tree, talk[:2], "1")
    assert asked(tree, talk, "2") == Following(0, [user("b")], 1)
    window = [SYSTEM, user("b"), said("2"), user("c")]
    assert asked(tree, window, "3") == Following(-1, window, 2)
    assert asked(tree, [*window, said("3"), user("d")], "4") == Following(2, [user("d")], 3)
    assert asked(tree, [SYSTEM, user("So far: a, b, c.")], "5").after == -1


def test_going_back_is_a_branch():
    tree = MessageTree()
    asked(tree, [user("a")], "1")
    asked(tree, [user("a"), said("1"), user("b")], "2")
    assert asked(tree, [user("a"), said("1"), user("other")], "3") == Following(0, [user("other")], 2)
    assert asked(tree, [user("a")], "4").after == -1, "the first request once more is another sample"


def test_sub_agents_that_take_turns_are_told_apart():
    tree = MessageTree()
    asked(tree, [user("parent")], "call both", ADD)
    asked(tree, [user("child x")], "1")
    asked(tree, [user("child y")], "2")
    assert asked(tree, [user("child x"), said("1"), user("more")], "3").after == 1
    assert asked(tree, [user("child y"), said("2"), user("more")], "4").after == 2
    assert asked(tree, [user("parent"), said("call both"), user("done")], "5", ADD).after == 0


def test_of_equal_answers_the_last_that_nothing_follows_is_continued():
    tree = MessageTree()
    for _ in range(2):
        asked(tree, [user("child")], "same")
    told = [user("child"), said("same"), user("more")]
    assert [asked(tree, told, "x").after, asked(tree, told, "y").after, asked(tree, told, "z").after] == [
        1,
        0,
        1,
    ]


def test_other_tools_are_another_conversation():
    tree = MessageTree()
    asked(tree, [user("a")], "1", ADD)
    told = [user("a"), said("1"), user("b")]
    assert tree.place(told, []).after == -1
    assert tree.place(told, [dict(reversed(ADD[0].items()))]) == Following(0, [user("b")], 2)


def test_an_answer_that_was_rewritten_begins_anew():
    tree = MessageTree()
    asked(tree, [user("a")], "1")
    asked(tree, [user("a"), said("1"), user("b")], "2")
    rewritten = [user("a"), said("1"), user("b"), said("two"), user("c")]
    assert tree.place(rewritten, []) == Following(-1, rewritten, 2)


def test_titles_and_probes_are_auxiliary_in_an_agent_with_tools():
    tree = MessageTree()
    asked(tree, [user("Write a title.")], "A sum")
    asked(tree, [user("a")], "1", ADD)
    assert tree.auxiliary("tools") == [0]
    asked(tree, [user("a"), said("1"), user("b")], "2", ADD)
    asked(tree, [user("Are you done?")], "yes")
    assert tree.auxiliary("tools") == tree.auxiliary("main") == [0, 3]
    assert tree.auxiliary("all") == []


def test_sub_agents_with_other_tools_are_trained_unless_only_the_longest_is_wanted():
    tree = MessageTree()
    asked(tree, [user("head")], "1", [{"name": "ask"}])
    asked(tree, [user("worker")], "2", ADD)
    asked(tree, [user("worker"), said("2"), user("b")], "3", ADD)
    assert (tree.auxiliary("tools"), tree.auxiliary("main")) == ([], [0])


@pytest.mark.parametrize("trained", ["tools", "main", "all"])
def test_without_tools_nothing_is_auxiliary(trained):
    tree = MessageTree()
    assert tree.auxiliary(trained) == []
    asked(tree, [user("a")], "1")
    asked(tree, [user("b")], "2")
    assert tree.auxiliary(trained) == []


class Walk(RuleBasedStateMachine):
    """Conversations of unique texts, which are known here as lists, and which the tree has to find.

    Any number of requests wait for their answers, and get them in any order, or never.
    """

    def __init__(self):
        super().__init__()
        self.tree, self.count = MessageTree(), 0
        self.waiting, self.known, self.begun = {}, {}, 0

    def ask(self, messages, tools, after):
        place = self.tree.place(messages, tools)
        assert (place.after, place.number) == (after, self.begun)
        begun = len(self.known[after][0]) if after >= 0 else 0
        assert place.new == messages[begun:]
        self.waiting[self.begun] = (messages, tools)
        self.begun += 1

    def new(self):
        self.count += 1
        return user(f"text {self.count}")

    @rule(tools=st.sampled_from([[], ADD]))
    def begin(self, tools):
        self.ask([SYSTEM, self.new()], tools, -1)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def answer(self, data):
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        messages, tools = self.waiting.pop(number)
        answer = said(f"answer {number}")
        self.tree.answered(number, answer)
        self.known[number] = ([*messages, answer], tools)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def refuse(self, data):
        del self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), spaces=st.sampled_from(["", " ", "\n"]))
    def go_on(self, data, spaces):
        number = data.draw(st.sampled_from(sorted(self.known)))
        messages, tools = self.known[number]
        sent = [{**m, "content": spaces + m["content"]} if m["role"] == "assistant" else m for m in messages]
        self.ask([*sent, self.new()], tools, number)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cut(self, data):
        """Leave out the first messages behind the system prompt."""
        messages, tools = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        self.ask([SYSTEM, *messages[2:], self.new()], tools, -1)

    @invariant()
    def answers_are_listed_in_their_order(self):
        assert self.tree.answers == list(self.known)
        with_tools = [number for number, (_, tools) in self.known.items() if tools]
        titles = [number for number in self.known if number not in with_tools] if with_tools else []
        assert self.tree.auxiliary("tools") == titles


TestWalk = Walk.TestCase


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=6))
def test_equal_texts_never_confuse_the_answers_of_one_conversation(texts):
    tree, talk = MessageTree(), []
    for number, text in enumerate(texts):
        talk.append(user(text))
        assert tree.place(talk, []).after == number - 1
        tree.answered(number, said("ok"))
        talk.append(said("ok"))
