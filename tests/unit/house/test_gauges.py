"""Every gauge that is sent is declared, and every declared gauge is sent."""

import time
from types import SimpleNamespace

from actors.generator.engine import SleepingEngine
from actors.generator.requests import RequestBook
from actors.generator.serving import Serving
from actors.generator.vllm_engine.engine import SchedulerGauges
from actors.generator.weights.staging import NewestWins, WeightUpdater
from broker.core.state import gauges_of
from broker.status import BROKER
from protocol.gauges import BY_ROLE, ENV, GENERATOR, merge_of, tag
from protocol.messages.peers import Goodbye, Heartbeat
from tests.broker_driver import Driver


def test_a_generator_sends_what_is_declared_of_generators():
    serving = object.__new__(Serving)
    serving.book, serving._engine = RequestBook(0.0), SimpleNamespace(version=3)
    updater = object.__new__(WeightUpdater)
    updater._pause_s, updater._applied, updater._refused, updater._queue = 0.0, 0, 0, NewestWins()
    engine = SimpleNamespace(kv="kept", full_step_s=0.0, frozen="", gauges=SchedulerGauges().take)
    sleeping = SleepingEngine(engine, lock=None)
    sent = serving.gauges(time.monotonic()) | updater.gauges() | sleeping.gauges()
    assert set(sent) == set(GENERATOR)


def test_the_broker_reports_what_is_declared_of_it():
    own = {name for name in gauges_of(Driver().dispatcher.state) if name.startswith("broker/")}
    assert own == {f"broker/{name}" for name in BROKER}


def test_an_environments_gauges_have_no_role_and_are_averaged_or_counted():
    driver = Driver()
    for actor, solved in (("a0", 2.0), ("a1", 4.0)):
        driver.actor(actor)
        driver.say(actor, Heartbeat(gauges={f"{ENV}depth": solved, f"{ENV}games_total": solved}))
    gauges = gauges_of(driver.dispatcher.state)
    assert gauges["env/depth"] == 3.0
    assert gauges["env/games_total"] == 6.0
    driver.say("a0", Goodbye())
    gauges = gauges_of(driver.dispatcher.state)
    assert (gauges["env/depth"], gauges["env/games_total"]) == (4.0, 6.0), "counters outlive their actor"


def test_every_total_is_a_counter():
    for role, gauges in BY_ROLE.items():
        for name in gauges:
            assert (merge_of(role, name) == "total") == name.endswith("_total"), name
            assert tag(role, name) == f"{role}/{name}"
