"""How the learner joins the broker."""

import time
from types import SimpleNamespace

import pytest

from learner import process
from learner.errors import BrokerRefused
from protocol.errors import LinkDown
from protocol.messages.peers import Refused


def a_link(**refusal):
    refused = Refused(message="resume from step 4", fatal=True, **refusal)
    session = SimpleNamespace(joined=False)
    return SimpleNamespace(session=session, refused=refused, trouble=refused.message, wait=time.sleep)


def test_a_learner_that_may_not_join_ends_at_once_with_the_reason():
    with pytest.raises(BrokerRefused, match=r"\(step_back\): resume from step 4"):
        process.await_broker(a_link(code="step_back"), "tcp://10.0.0.1:5755")


def test_a_key_that_is_not_listed_yet_has_the_time_to_join(monkeypatch):
    monkeypatch.setattr(process, "JOIN_TIMEOUT_S", 0.05)
    with pytest.raises(LinkDown, match="resume from step 4"):
        process.await_broker(a_link(code="wrong_key"), "tcp://10.0.0.1:5755")
