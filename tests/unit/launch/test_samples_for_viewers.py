"""Test what `offbeat samples` hands to other viewers: logs that inspect_ai reads, and spans that a receiver takes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import pytest

from broker.core.records import GroupClosed, encode_event
from broker.journal.writer import Kind, pack_segment, unpack_segment
from launch.cli import main
from launch.commands.otlp import Phase, phases_by_task
from learner.samples import SAMPLES_FILE, Sample, SamplePart, encode_line
from protocol.messages.episodes import TurnTime
from tests.journals import DEADLINE_S, begin, small
from tests.unit.launch.test_journal_command import segment

AT = 1_800_000_000.25


def sample(step, task, **fields):
    parts = [
        SamplePart("prompt", "<user>1 + 1\x1b[2J?", 4),
        SamplePart("answer", "call", 2),
        SamplePart("observation", "2", 1),
        SamplePart("answer", "= 2\ud7ff", 2),
    ]
    given = {
        "policy_version": step, "split": "train", "env": "sums", "group": task.partition(".")[0], "parts": parts,
        "return_": 0.5, "rewards": {"exact": 0.5}, "time": AT + step, "answer": "2", "target": "2", "correct": True,
        "end": "finished: stop", "lag": 1, "version_min": 0, "version_max": 0,
    }  # fmt: skip
    return Sample(step=step, task=task, **given | fields)


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run with four samples and the journal of one of them."""
    folder = tmp_path / "sums"
    rows = [
        sample(1, "1g1.0"),
        sample(1, "1g1.0", return_=1.5, correct=False),
        sample(2, "1g2.0", failed=True, failure="KeyError: 'x'", answer=None, target=None, correct=None),
        sample(2, "1eval-2-0", split="heldout", evaluation="step 2"),
    ]
    with begin(folder / "journal", small()) as journal:
        head = unpack_segment(
            b"".join(
                segment(
                    "1g1.0.0",
                    0,
                    5,
                    status="finished",
                    times=[TurnTime(0, 0, 0, 4.0), TurnTime(1, 1.0, 2.0, 0.5)],
                )
            )
        )
        journal.append(Kind.SEGMENT, *pack_segment(*head, AT))
        journal.append(Kind.SEGMENT, *segment("1g9.0.0", 0, 3, status="finished"))
        journal.append(Kind.EVENT, encode_event(GroupClosed(group_id="1g1")))
        assert journal.sync(DEADLINE_S)
    (folder / SAMPLES_FILE).write_bytes(b"".join(map(encode_line, rows)))
    return folder


MEAN = "mean_of_kept_samples"

# --- Inspect View -------------------------------------------------------------------------------------------


def test_each_step_and_each_evaluation_is_a_log(run, tmp_path, capsys):
    for _ in range(2):
        assert main(["samples", str(run), "--inspect", str(tmp_path / "logs")]) == 0
    assert "4 samples in 3 logs; look at them with: inspect view --log-dir" in capsys.readouterr().out
    logs = {
        log["eval"]["task"]: log
        for log in map(json.loads, (p.read_text() for p in (tmp_path / "logs").iterdir()))
    }
    assert sorted(logs) == ["heldout-step 2-step-000002", "train-step-000001", "train-step-000002"]
    first = logs["train-step-000001"]
    assert [entry["epoch"] for entry in first["samples"]] == [1, 2]
    assert {score["name"]: score["metrics"][MEAN]["value"] for score in first["results"]["scores"]} == {
        "return": 1.0, "correct": 0.5, "reward/exact": 0.5
    }  # fmt: skip
    assert [m["role"] for m in first["samples"][0]["messages"]] == ["user", "assistant", "user", "assistant"]
    failed = logs["train-step-000002"]
    assert failed["samples"][0]["error"]["message"] == "KeyError: 'x'"
    assert failed["results"]["scores"] == []
    assert all(path.read_bytes().isascii() for path in (tmp_path / "logs").iterdir())


def test_inspect_ai_reads_the_logs(run, tmp_path):
    log = pytest.importorskip("inspect_ai.log")
    assert main(["samples", str(run), "--inspect", str(tmp_path / "logs")]) == 0
    found = [log.read_eval_log(str(info.name)) for info in log.list_eval_logs(str(tmp_path / "logs"))]
    assert sum(len(one.samples) for one in found) == 4
    assert {one.status for one in found} == {"success"}
    (first,) = [one for one in found if one.eval.task == "train-step-000001"]
    entry = first.samples[0]
    assert (entry.target, entry.scores["return"].value, entry.scores["return"].answer) == ("2", 0.5, "2")
    assert entry.output.completion == "= 2\ud7ff"
    assert entry.input == "<user>1 + 1\x1b[2J?"
    # A few samples are kept, the best and the worst among them: their mean is not that of the step.
    assert first.results.scores[0].metrics["mean_of_kept_samples"].value == 1.0


def test_the_other_options_choose_what_is_handed_over(run, tmp_path, capsys):
    assert main(["samples", str(run), "--heldout", "--inspect", str(tmp_path / "logs")]) == 0
    assert "1 samples in 1 logs" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["samples", str(run), "--inspect", str(tmp_path / "file")]) == 1
    assert "--inspect" in capsys.readouterr().err


# --- OTLP ---------------------------------------------------------------------------------------------------


class Receiver(BaseHTTPRequestHandler):
    """Keeps what is posted, and answers with the server's code."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.taken.append((self.path, headers, json.loads(body)))
        self.send_response(self.server.code)
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()
        self.wfile.write(b"{}" if self.server.code == 200 else b"no\x1b room")

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver():
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    server.taken, server.code = [], 200
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def values(span):
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


def test_a_sample_is_a_trace_with_the_times_of_its_turns(run, receiver, monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20secret,x-project=sums")
    url = f"http://127.0.0.1:{receiver.server_port}"
    for _ in range(2):
        assert main(["samples", str(run), "--otlp", url]) == 0
    printed = capsys.readouterr().out
    assert "4 samples in 12 spans" in printed
    assert "secret" not in printed
    (path, headers, body), again = receiver.taken
    assert (path, headers["authorization"], headers["content-type"]) == (
        "/v1/traces",
        "Basic secret",
        "application/json",
    )
    assert again[2] == body
    (resource,) = body["resourceSpans"]
    assert values(resource["resource"]) == {"service.name": "offbeat/sums"}
    spans = resource["scopeSpans"][0]["spans"]
    roots = [span for span in spans if "parentSpanId" not in span]
    assert len(roots) == 4
    assert len({span["spanId"] for span in spans}) == 12, "two samples of one task and step are two traces"
    assert all((len(span["traceId"]), len(span["spanId"])) == (32, 16) for span in spans)
    first = roots[0]
    facts = values(first)
    assert facts["output.value"] == "call [2] = 2\ud7ff"
    assert (facts["offbeat.answer"], facts["offbeat.lag"], facts["offbeat.correct"]) == ("2", "1", True)
    assert facts["offbeat.reward.exact"] == 0.5
    assert int(first["startTimeUnixNano"]) == int((AT - 7.5) * 1e9)
    assert int(first["endTimeUnixNano"]) == int(AT * 1e9)
    children = [span for span in spans if span.get("parentSpanId") == first["spanId"]][:4]
    assert [span["name"] for span in children] == ["tools 0", "waited 1", "sampled 1", "tools 1"]
    times = [(span["startTimeUnixNano"], span["endTimeUnixNano"]) for span in children]
    assert all(one[1] == other[0] for one, other in pairwise(times))
    assert roots[2]["status"] == {"code": 2, "message": "KeyError: 'x'"}
    assert roots[2]["startTimeUnixNano"] == roots[2]["endTimeUnixNano"] == str(int((AT + 2) * 1e9))


def test_times_come_from_the_journal_where_it_has_them(run, tmp_path):
    found = phases_by_task(run / "journal")
    assert found["1g1.0"][-1] == Phase("tools", 1, AT - 0.5, AT)
    assert found["1g9.0"] == []
    assert phases_by_task(tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("code", "said"), [(500, "500 Internal Server Error: no\\x1b room"), (302, "302 Found")]
)
def test_a_receiver_that_refuses_is_named(run, receiver, capsys, code, said):
    receiver.code = code
    assert main(["samples", str(run), "--otlp", f"http://127.0.0.1:{receiver.server_port}/v1/traces/"]) == 1
    assert said in capsys.readouterr().err
    assert [path for path, *_ in receiver.taken] == ["/v1/traces"], "headers with a secret follow no redirect"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:6006", "give an address such as http://localhost:6006"),
        ("file:///etc/passwd", "give an address"),
        ("http://me:secret@127.0.0.1:9", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("http://127.0.0.1:9", "is a receiver there?"),
    ],
)
def test_an_address_that_cannot_be_is_refused(run, capsys, url, said):
    assert main(["samples", str(run), "--otlp", url]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error
