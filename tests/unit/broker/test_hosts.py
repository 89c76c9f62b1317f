"""The broker knows the hosts of its peers: who is there, what was lost with them, who is asked to leave."""

from broker.core.hosts import NAMED, OTHERS
from broker.core.state import gauges_of
from broker.metrics import prometheus
from broker.status import HOSTS, status
from protocol.digest import OTHER_DIGEST
from protocol.messages.peers import Drain, Goodbye, Heartbeat, Hello, Refused, Welcome
from tests.broker_driver import Driver


def join(driver, role, name, **told):
    endpoint = {"endpoint": "tcp://10.0.0.7:1"} if role == "generator" else {}
    return driver.say(name, Hello(role=role, peer=name, incarnation=1, **endpoint, **told))


def of(driver, name):
    return {key.removeprefix("hosts/"): value for key, value in gauges_of(driver.dispatcher.state).items()}[
        name
    ]


def page(driver):
    return status(driver.dispatcher, driver.now)["hosts"]


def test_a_host_is_there_while_one_of_its_peers_is():
    driver = Driver()
    driver.actor("actor-0")
    assert page(driver) == []
    join(driver, "generator", "generator-gpu7-0", on_host="gpu7", job="slurm 12_3")
    join(driver, "actor", "actor-gpu7-0", on_host="gpu7", restarts=2, died="code 1\nlast line")
    driver.say("generator-gpu7-0", Heartbeat(gauges={"tokens_per_second": 50.0}))
    (host,) = page(driver)
    assert host["name"] == "gpu7"
    assert (host["job"], host["generators"], host["actors"]) == ("slurm 12_3", 1, 1)
    assert (host["tokens_per_second"], host["policy_lag"], host["restarts"]) == (50.0, 0, 2)
    assert host["died"] == "code 1\nlast line"
    assert (of(driver, "count"), of(driver, "joined_total")) == (1, 1)
    driver.say("actor-gpu7-0", Goodbye())
    assert of(driver, "count") == 1
    driver.say("generator-gpu7-0", Goodbye())
    assert (of(driver, "count"), of(driver, "lost_total")) == (0, 0)
    assert page(driver) == []


def test_a_peer_speaks_for_the_host_in_its_name_alone():
    driver = Driver()
    join(driver, "actor", "actor-gpu7-0", on_host="gpu8")
    join(driver, "actor", "actor-1", on_host="1")
    assert page(driver) == []


def test_the_last_hosts_have_gauges_together():
    driver = Driver()
    for number in range(NAMED + 2):
        name = f"generator-h{number}-0"
        join(driver, "generator", name, on_host=f"h{number}")
        driver.say(name, Heartbeat(gauges={"tokens_per_second": 1.0}))
    gauges = gauges_of(driver.dispatcher.state)
    single = [key for key in gauges if key.startswith("hosts/tokens_per_second/")]
    assert len(single) == NAMED + 1
    assert gauges[f"hosts/tokens_per_second/{OTHERS}"] == 2.0
    declared = {key.removeprefix("hosts/").partition("/")[0] for key in gauges if key.startswith("hosts/")}
    assert declared == set(HOSTS)
    assert "how far the last generator of a host is behind" in prometheus(driver.dispatcher, 0.0).decode()


def test_all_peers_of_a_host_are_asked_to_leave_and_no_others():
    driver = Driver()
    for role, name, host in (
        ("generator", "generator-gpu-7-0", "gpu-7"),
        ("actor", "actor-gpu-7-0", "gpu-7"),
        ("actor", "actor-gpu-70-0", "gpu-70"),
        ("actor", "actor-0", ""),
    ):
        join(driver, role, name, on_host=host)
    asked = driver.dispatcher.ask_to_leave("gpu-7", "asked", driver.now)
    assert {send.peer for send in asked if isinstance(send.message, Drain)} == {
        "generator-gpu-7-0",
        "actor-gpu-7-0",
    }
    asked = driver.dispatcher.ask_to_leave("actor-gpu-70-0", "asked", driver.now)
    assert [send.peer for send in asked if isinstance(send.message, Drain)] == ["actor-gpu-70-0"]
    assert not driver.dispatcher.ask_to_leave("gpu", "asked", driver.now)


def test_a_peer_of_other_settings_is_refused_with_both_values():
    driver = Driver()
    driver.dispatcher.digest = "offbeat=1 env=aa"
    (refused,) = join(driver, "actor", "actor-gpu7-0", on_host="gpu7", digest="offbeat=1 env=bb")
    assert isinstance(refused, Refused)
    assert (refused.code, refused.fatal) == ("wrong_digest", True)
    assert OTHER_DIGEST in refused.message
    assert "env is bb, in the run aa" in refused.message
    for digest in ("offbeat=1 env=aa", ""):
        said = join(driver, "actor", "actor-gpu7-0", on_host="gpu7", digest=digest)
        assert any(isinstance(message, Welcome) for message in said)
