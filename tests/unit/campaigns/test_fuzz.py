"""Run a few hundred fixed inputs of each fuzzing target; docs/run/fuzzing.md has the long runs."""

import json

import pytest

from tests.campaigns.fuzz import program as fuzz
from tests.campaigns.fuzz.engine import Hang, Loop

INPUTS = {"decoder": 800, "broker": 40, "journal": 400, "manifest": 300, "session": 300}


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_nothing_is_found(name):
    report = Loop(fuzz.TARGETS[name]()).many(seed=7, inputs=INPUTS[name])
    assert {place: finding.text for place, finding in report.findings.items()} == {}
    assert report.units > 0


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_an_input_follows_from_seed_and_number(name):
    one, other = (Loop(fuzz.TARGETS[name]()) for _ in range(2))
    for number in (0, 5, 77):
        assert one.make(3, number) == other.make(3, number)
    assert one.make(3, 5) != one.make(4, 5)


class Broken:
    """A target that fails in two places, in one of them for two inputs, and never ends for one input."""

    name, unit, done = "broken", "", 0

    def make(self, rng):
        return bytes([rng.getrandbits(8)])

    def run(self, data):
        match data:
            case b"a" | b"b":
                raise KeyError(data)
            case b"c":
                assert not data, "c"
            case b"d":
                try:
                    while True:
                        pass
                except Exception:
                    return


def test_what_fails_is_kept_once_with_its_input(tmp_path):
    loop = Loop(Broken(), tmp_path)
    for number, data in enumerate((b"x", b"a", b"b", b"c", b"a")):
        loop.one(data, seed=2, number=number)
    keys, assertion = loop.report.findings.values()
    assert (keys.number, keys.count, assertion.number, assertion.count) == (1, 3, 3, 1)
    assert (tmp_path / "broken-2-1.bin").read_bytes() == b"a"
    assert "KeyError" in (tmp_path / "broken-2-1.txt").read_text()
    assert loop.report.inputs == 5


def test_an_input_that_does_not_end_is_a_finding_and_the_run_goes_on():
    loop = Loop(Broken(), limit_s=0.05)
    loop.one(b"d")
    loop.one(b"x")
    assert list(loop.report.findings) == ["an input took too long"]
    assert loop.report.inputs == 2
    # Hang is not an Exception, so that the tested code cannot catch it.
    assert not issubclass(Hang, Exception)


def test_a_run_in_its_own_process_reports_and_can_be_taken_up_anywhere(tmp_path, monkeypatch, capsys):
    out = tmp_path / "report.json"
    command = ["fuzz", "--target", "decoder", "--inputs", "50", "--seed", "3", "--start", "100"]
    monkeypatch.setattr("sys.argv", [*command, "--out", str(out), "--findings", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        fuzz.main()
    assert ended.value.code == 0
    (report,) = json.loads(out.read_text())["results"]
    assert (report["target"], report["inputs"], report["findings"]) == ("decoder", 50, {})
    assert 0 < report["peak_rss"] < fuzz.MAX_RSS_BYTES
    assert "| decoder | 50 |" in capsys.readouterr().out
