"""Whom `offbeat view` answers, by the names under which a browser asks for it."""

import pytest

from launch.view.gate import Gate


@pytest.mark.parametrize(
    ("host", "port", "encrypted", "asked", "status"),
    [
        ("Node7.Cluster", 6007, True, "node7.cluster:6007", None),
        ("node7", 443, True, "node7", None),
        ("node7", 80, True, "node7", 421),
        ("node7", 443, False, "node7", 421),
        ("127.0.0.1", 80, False, "localhost", None),
        ("fd00::7", 443, True, "[fd00::7]", None),
        ("node7", 443, True, "evil.example", 421),
        ("node7", 443, True, "", 421),
    ],
)
def test_the_own_address_is_answered_as_a_browser_writes_it(host, port, encrypted, asked, status):
    gate = Gate(host, port, encrypted, lambda _: False)
    scheme = "https" if encrypted else "http"
    for headers in ({"Host": asked}, {"Host": asked, "Origin": f"{scheme}://{asked}"}):
        refused = gate.refusal("GET", "/", headers, "")
        assert (refused.status if refused else None) == status
