"""Scaling and draining: the youngest leave first, never the last by chance, and each change names who does it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import ConfigError
from launch.fleet import wanted
from launch.fleet.wanted import members, plan, read_changes
from protocol.wanted import FILE, MAX_BYTES, Wanted, WantedFile, parse


def peers(*names, role="generator"):
    """Return the broker's entries; the first has joined first."""
    return [
        {"name": name, "role": role, "connected_s": float(100 - age), "on_host": ""}
        for age, name in enumerate(names)
    ]


def test_the_supervisor_of_the_head_starts_what_is_missing():
    made = plan("generator", ("", 6), peers("generator-0", "generator-gpu7-0"), 1, supervised=True)
    assert (made.before, made.after, made.local, made.leaving) == (2, 6, 5, ())
    assert made.sentence() == "generators: 2 now, 6 wanted; the supervisor of the head starts 4"


def test_the_youngest_leave_first_whoever_supervises_them():
    there = peers("generator-0", "generator-gpu7-0", "generator-1", "generator-gpu8-0")
    made = plan("generator", ("-", 2), there, 2, supervised=True)
    assert (made.local, made.leaving) == (1, ("generator-gpu8-0",))
    assert "the supervisor of the head drains 1; the broker drains generator-gpu8-0" in made.sentence()


def test_one_that_has_not_joined_yet_is_the_youngest():
    made = plan("generator", ("", 2), peers("generator-0", "generator-gpu7-0"), 2, supervised=True)
    assert (made.before, made.local, made.leaving) == (3, 1, ())


def test_without_a_supervisor_nobody_can_start_processes():
    with pytest.raises(ConfigError, match="offbeat ticket"):
        plan("actor", ("+", 1), [], 0, supervised=False)
    made = plan("actor", ("", 0), peers("actor-gpu7-0", role="actor"), 0, supervised=False)
    assert made.leaving == ("actor-gpu7-0",)


@given(
    st.integers(0, 5),
    st.integers(0, 5),
    st.sampled_from(["", "+", "-"]),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_a_plan_adds_up(local, hosted, sign, number, random):
    names = [f"generator-{n}" for n in range(local)] + [f"generator-h{n}-0" for n in range(hosted)]
    random.shuffle(names)
    made = plan("generator", (sign, number), peers(*names), local, supervised=True)
    assert made.before == local + hosted
    assert made.local + hosted - len(made.leaving) == made.after
    assert made.local >= 0
    assert made.after > 0 or not made.before or (sign, number) == ("", 0)
    stay = {name for name in names if name not in made.leaving and not wanted.is_local(name)}
    ages = {name: age for age, name in enumerate(names)}
    assert all(ages[one] < ages[gone] for one in stay for gone in made.leaving), "the youngest leave"


@pytest.mark.parametrize("word", ["generators", "generators=x", "learners=2", "actors=1.5", "actors=+-1"])
def test_a_word_that_is_no_change_is_refused(word):
    with pytest.raises(ConfigError, match="generators=N"):
        read_changes([word])


def test_a_name_of_drain_is_a_host_or_a_peer_of_one():
    there = peers("generator-gpu7-0", "generator-gpu7-1", "generator-0")
    there[0]["on_host"] = "gpu7"
    assert members("gpu7", there) == ["generator-gpu7-0", "generator-gpu7-1"]
    assert members("generator-gpu7-1", there) == ["generator-gpu7-1"]
    with pytest.raises(ConfigError, match="hosts are gpu7"):
        members("gpu8", there)
    with pytest.raises(ConfigError, match="offbeat scale"):
        members("generator-0", there)


def test_the_file_keeps_what_was_asked_before(tmp_path):
    one = plan("generator", ("", 3), peers("generator-0"), 1, supervised=True)
    wanted.write(tmp_path, [one])
    wanted.write(tmp_path, [], ["gpu7"])
    found = wanted.read(tmp_path)
    assert (found.generators, found.actors) == (3, None)
    assert [leaving.name for leaving in found.leaving] == ["gpu7"]
    file = WantedFile(tmp_path / FILE)
    assert file.changed() == found
    assert file.changed() is None
    (tmp_path / FILE).write_text(" " * (MAX_BYTES + 1))
    assert file.changed() is None


@given(st.text(max_size=200))
def test_any_text_in_the_file_is_survived(text):
    assert isinstance(parse(text), Wanted)


# --- following the broker's advice ------------------------------------------------------------------------


def answer(generators, *, peers, actors=1, measured=True):
    advice = {"generators": generators, "actors": actors, "reason": "because", "measured": measured}
    return {"peers": peers, "fleet": {"wanted": advice}}


def here(*names, **more):
    return [{"name": name, "role": name.partition("-")[0], "connected_s": 9.0, **more} for name in names]


def test_a_follower_writes_what_the_broker_advises_once(tmp_path):
    said = []
    follower = wanted.Follower(tmp_path, ["generator"], starts=True, note=said.append)
    peers, started = here("generator-0", "actor-0"), ["broker", "generator-0", "actor-0"]
    follower.look(answer(2, peers=peers, measured=False), started, 0.0)
    follower.look(answer(1, peers=peers), started, 1.0)
    assert not (tmp_path / "wanted.json").exists()
    follower.look(answer(2, peers=peers, actors=5), started, 2.0)
    assert wanted.read(tmp_path) == Wanted(generators=2)
    assert said == ["generators: 1 now, 2 wanted; the supervisor of the head starts 1: because"]
    follower.look(answer(2, peers=peers), [*started, "generator-1"], 3.0)
    assert len(said) == 1
    follower.look(answer(1, peers=here("generator-0", "generator-1")), [*started, "generator-1"], 70.0)
    assert wanted.read(tmp_path).generators == 1


def test_a_follower_lets_the_youngest_of_another_host_leave(tmp_path):
    said = []
    follower = wanted.Follower(tmp_path, ["generator"], starts=False, note=said.append)
    peers = [*here("generator-a-0"), *here("generator-b-0"), *here("generator-c-0", leaving=True)]
    peers[1]["connected_s"] = 3.0
    follower.look(answer(1, peers=peers), [], 0.0)
    assert [one.name for one in wanted.read(tmp_path).leaving] == ["generator-b-0"]


def test_a_head_that_starts_nothing_does_not_grow(tmp_path):
    said = []
    follower = wanted.Follower(tmp_path, ["generator"], starts=False, note=said.append)
    follower.look(answer(4, peers=here("generator-a-0")), [], 0.0)
    assert not said
    assert not (tmp_path / "wanted.json").exists()
