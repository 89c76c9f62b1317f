"""Test which roles hang, judged by the broker's and the kernel's numbers."""

from launch.run_file.load import check
from launch.supervise.health import Hung, Limits, Vitals, Watchdog
from launch.supervise.posts import limits

LIMITS = Limits(
    silence_s=7.0,
    computing_silence_s=60.0,
    start_s=100.0,
    broker_start_s=50.0,
    generator_stall_s=9.0,
    learner_stall_s=300.0,
)


def run(**learner):
    return check({"model": {"path": "m"}, "env": {"name": "calculator"}, "learner": learner}, "a test")


def peer(name, *, silent=0.0, connected=1e9, busy=False, stalled=0.0):
    return {"name": name, "silent_s": silent, "connected_s": connected, "busy": busy, "stalled_s": stalled}


def watching(*names, now=0.0):
    dog = Watchdog(LIMITS)
    for name in names:
        dog.started(name, now)
    return dog


def seconds(dog, begin, end, status, vitals=lambda now: {}):
    """Look once a second. Return the time of the first findings and the findings, or None."""
    for now in range(begin, end):
        if hung := dog.look(status(now), vitals(now), float(now)):
            return now, hung
    return None


def listed(*peers):
    return lambda now: {"peers": [p | {"connected_s": min(p["connected_s"], now)} for p in peers]}


def test_a_peer_that_falls_silent_is_found_within_ten_seconds_also_when_the_broker_has_dropped_it():
    dog = watching("broker", "actor-0")
    assert seconds(dog, 1, 20, listed(peer("actor-0"))) is None

    # The peer was last heard at 19; the broker drops it after five seconds.
    def then(now):
        return listed(peer("actor-0", silent=now - 19.0))(now) if now < 25 else {"peers": []}

    now, hung = seconds(dog, 20, 60, then)
    assert now - 19 <= 8
    assert [found.name for found in hung] == ["actor-0"]


def test_a_silent_process_that_computes_gets_longer():
    dog = watching("learner")
    seconds(dog, 1, 5, listed(peer("learner")))
    now, _ = seconds(dog, 5, 200, lambda now: {"peers": []}, lambda now: {"learner": Vitals(cpu_s=0.5 * now)})
    assert 60 <= now - 4 <= 62


def test_a_peer_that_never_joins_has_until_the_start_deadline():
    dog = watching("generator-0")
    now, hung = seconds(dog, 1, 200, lambda now: {"peers": []})
    assert now == 101
    assert "not joined" in hung[0].why


def test_a_learner_on_several_hosts_may_wait_for_them_before_it_joins():
    """torchrun waits ten minutes for the other hosts, and only then the model is loaded."""
    dog = Watchdog(limits(run(nodes=2, rendezvous="10.0.0.1:29500")))
    dog.started("learner", 0.0)
    dog.started("generator-0", 0.0)
    now, hung = seconds(dog, 1, 2000, lambda now: {"peers": []})
    assert (now, [found.name for found in hung]) == (601, ["generator-0"])
    dog.ended("generator-0")
    now, hung = seconds(dog, 602, 2000, lambda now: {"peers": []})
    assert (now, hung[0].why) == (1201, "it has not joined the broker in 1201 s")
    alone = Watchdog(limits(run()))
    alone.started("learner", 0.0)
    assert seconds(alone, 1, 2000, lambda now: {"peers": []})[0] == 601


def test_the_entry_of_the_process_before_says_nothing_of_this_one():
    dog = watching("generator-0", now=50.0)
    old = {"peers": [peer("generator-0", silent=30.0, connected=60.0, busy=True, stalled=99.0)]}
    assert dog.look(old, {}, 51.0) == []
    new = {"peers": [peer("generator-0", silent=0.1, connected=1.0, busy=True, stalled=0.0)]}
    assert dog.look(new, {}, 53.0) == []


def test_busy_without_progress_counts_for_generators_and_learners_alone():
    dog = watching("generator-0", "learner", "actor-0")
    stuck = [peer(name, busy=True, stalled=9.5) for name in ("generator-0", "learner", "actor-0")]
    assert [found.name for found in dog.look(listed(*stuck)(5), {}, 5.0)] == ["generator-0"]
    idle = [peer(name, busy=False, stalled=999.0) for name in ("generator-0", "learner")]
    assert dog.look(listed(*idle)(6), {}, 6.0) == []
    writing = peer("learner", busy=True, stalled=301.0) | {"patience_s": 20.0}
    assert dog.look(listed(writing)(6), {}, 6.5) == [], "a checkpoint takes as long as its bytes take"
    assert dog.look(listed(peer("learner", busy=True, stalled=301.0))(7), {}, 7.0)[0].name == "learner"


def test_a_stopped_process_is_found_whatever_the_broker_says():
    dog = watching("broker", "learner")
    status = listed(peer("learner"))
    assert seconds(dog, 1, 10, status) is None
    now, hung = seconds(dog, 10, 40, status, lambda now: {"learner": Vitals(stopped=4711)})
    assert now == 17
    assert hung == [Hung("learner", "its process 4711 has been stopped for 7.0 s")]


def test_a_process_that_goes_on_is_not_judged_by_its_stop_before():
    dog = watching("learner")
    status = listed(peer("learner"))
    for stop in range(0, 60, 6):
        assert seconds(dog, stop + 1, stop + 6, status, lambda now: {"learner": Vitals(stopped=1)}) is None
        assert dog.look(status(stop + 6), {}, stop + 6.0) == []


def test_a_broker_that_stops_answering_is_found_and_takes_nobody_with_it():
    dog = watching("broker", "actor-0", "learner")
    assert seconds(dog, 1, 10, listed(peer("actor-0"), peer("learner"))) is None
    now, hung = seconds(dog, 10, 60, lambda now: None)
    assert now - 9 <= 8
    assert [found.name for found in hung] == ["broker"]
    dog.started("broker", float(now))
    assert seconds(dog, now + 1, now + 40, lambda now: None) is None, "it reads its journal"
    back = now + 40
    assert seconds(dog, back, back + 6, lambda now: {"peers": []}) is None, "they have to join first"


def test_a_host_that_was_cut_off_from_the_head_restarts_nobody_who_comes_back():
    dog = watching("actor-a-0", "generator-a-0")
    names = ("actor-a-0", "generator-a-0")
    assert seconds(dog, 1, 10, listed(*map(peer, names))) is None
    assert seconds(dog, 10, 40, lambda now: None) is None

    # The broker answers again, before all have joined it again. One never does.
    def then(now):
        return listed(*(peer(name) for name in names[: int(now >= 43)]))(now)

    now, hung = seconds(dog, 40, 60, then)
    assert (now, [found.name for found in hung]) == (47, ["generator-a-0"])


def test_one_late_answer_is_no_silence():
    dog = watching("broker")
    dog.look({"peers": []}, {}, 1.0)
    # The supervisor itself stands still between these looks.
    for now in (10.0, 20.0, 30.0):
        assert dog.look(None, {}, now) == []


def test_after_a_standstill_of_our_own_nobody_is_guilty():
    dog = watching("broker", "actor-0", "learner")
    assert seconds(dog, 1, 10, listed(peer("actor-0"), peer("learner"))) is None
    assert dog.look({"peers": []}, {"actor-0": Vitals(stopped=1)}, 500.0) == []
    assert (
        dog.look(listed(peer("actor-0", connected=0.5), peer("learner", connected=0.5))(502), {}, 502.0) == []
    )


def test_a_server_that_is_no_peer_is_watched_by_the_kernel_alone():
    dog = watching("environment-0")
    assert seconds(dog, 1, 300, lambda now: {"peers": []}) is None
    now, _ = seconds(
        dog, 300, 400, lambda now: {"peers": []}, lambda now: {"environment-0": Vitals(stopped=1)}
    )
    assert now == 307


def test_who_has_ended_is_not_watched():
    dog = watching("learner")
    seconds(dog, 1, 5, listed(peer("learner")))
    dog.ended("learner")
    assert seconds(dog, 5, 300, lambda now: {"peers": []}) is None
