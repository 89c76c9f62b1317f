"""Objects of Kubernetes are text that YAML reads back; `kubectl` is called as a stand-in in PATH notes it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.cli import main
from launch.errors import ConfigError, NoAnswer
from launch.fleet import kubectl, kubernetes, probe
from launch.fleet.engines import EngineFailed, launched_of
from launch.fleet.site import KubernetesSite, read_site
from launch.fleet.ticket import name_of_host
from launch.preflight.memory import SHARED_MARGIN, ModelSize, shared_bytes, shared_words
from tests.unit.launch.fleet.test_render import SITE, job

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | TEXT
    | st.sampled_from(["yes", "1e3", "a: b", "- c", "\n x\n", "l\n\nm\n"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(TEXT, VALUES, min_size=1, max_size=4), min_size=1, max_size=3))
def test_yaml_reads_back_what_was_written(documents):
    assert list(yaml.safe_load_all(kubernetes.to_yaml(documents))) == documents


def test_pods_are_bounded_and_have_no_rights():
    made = [one for file in kubernetes.objects(job(), SITE.kubernetes).values() for one in file]
    (account,) = [one for one in made if one["kind"] == "ServiceAccount"]
    assert account["automountServiceAccountToken"] is False
    assert not {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "Secret"} & {
        one["kind"] for one in made
    }
    pods = [one["spec"]["template"]["spec"] for one in made if "template" in one.get("spec", {})]
    assert len(pods) == 3
    for pod in pods:
        (container,) = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/dev/shm", "/tmp", "/work"}
    assert [pod["terminationGracePeriodSeconds"] for pod in pods] == [300, 100, 100]


def test_overrides_are_words_that_kubernetes_does_not_replace():
    (_, head) = kubernetes.objects(job(overrides=["run.project=$(HOME)x"]), SITE.kubernetes)["head.yaml"]
    (container,) = head["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "run.project=$$(HOME)x"
    assert "run.project" not in container["command"][4]


def test_shared_memory_follows_from_the_model_and_the_versions_that_are_kept():
    config = job(learner={"keep_versions": 3, "publish_dtype": "bfloat16"}).config
    size = ModelSize(parameters=7_000_000_000, hidden=1, inner=1, layers=1)
    head, host = shared_bytes(config, size)
    assert (head - SHARED_MARGIN, host - SHARED_MARGIN) == (
        4 * 14_000_000_000,
        4 * 14_000_000_000,
    )
    said = shared_words(config, size)
    assert said.startswith(
        "/dev/shm in a container: 54430Mi for the whole run or its head, 54430Mi for a further host"
    )
    (_, made) = kubernetes.objects(job(), SITE.kubernetes)["head.yaml"]
    shared = next(
        one for one in made["spec"]["template"]["spec"]["volumes"] if one["name"] == "shared-memory"
    )
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "3072Mi"}


@pytest.mark.parametrize("name", ["Run", "a.b", "a" * 28, "a-"])
def test_a_name_that_kubernetes_cannot_have_is_refused(name):
    with pytest.raises(ConfigError, match="at most 27 lower-case"):
        kubernetes.objects(job(run={"name": name}), SITE.kubernetes)


def test_names_of_hosts_stay_different_where_names_of_pods_are_long():
    pods = [f"offbeat-a-run-with-a-long-name-12-generators-7d9f8c6b5-{end}" for end in ("x2x4z", "x2x4y")]
    names = {name_of_host("g", pod) for pod in pods}
    assert len(names) == 2
    assert all(len(name) <= 50 for name in names)


def test_what_pods_would_lack_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("x = 1\n")
    (tmp_path / "site.toml").write_text('[kubernetes]\nimage = "i"\n')
    with pytest.raises(ConfigError, match="is of this machine"):
        kubectl.refuse_local_model(str(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        kubectl.carried(Path("spell_backward"), KubernetesSite(files=("absent.py",)))
    with pytest.raises(ConfigError, match="rename one"):
        kubectl.carried(Path("spell_backward"), KubernetesSite(files=("run.toml",)))
    too_long = replace(job(), content=dict.fromkeys(["run.toml", "a.py"], "x" * 600_000))
    with pytest.raises(ConfigError, match="ConfigMap holds"):
        kubernetes.objects(too_long, SITE.kubernetes)
    with pytest.raises(ConfigError, match=r"kubernetes\.image is empty"):
        kubernetes.objects(job(), KubernetesSite())


def test_the_page_has_a_site_file_that_can_be_read(tmp_path):
    page = (Path(__file__).parents[4] / "docs" / "run" / "kubernetes.md").read_text()
    path = tmp_path / "site.toml"
    path.write_text(textwrap.dedent(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1]))
    site = read_site(path).kubernetes
    assert (site.generators, site.gpus, site.tolerations) == (4, 1, ("spot",))
    assert [one["kind"] for one in kubernetes.objects(job(), site)["head.yaml"]] == ["Service", "StatefulSet"]


STAND_IN = """#!/bin/sh
echo "$@" >>"$HERE/calls"
trap 'echo drained; exit 75' TERM
echo started
while [ ! -e "$HERE/code" ]; do /bin/sleep 0.05; done
code=$(cat "$HERE/code") && rm "$HERE/code"
exit "$code"
"""


class Container:
    """The script of a pod's container in a folder, with a stand-in for `offbeat` that ends as it is told."""

    def __init__(self, here, file, template):
        self.here = here
        (container,) = template["spec"]["containers"]
        self._script = container["command"][4]
        for there in ("/work", "/config", "/run/offbeat"):
            self._script = self._script.replace(f"{there}/", f"{here}{there}/")
            (here / there[1:]).mkdir(parents=True, exist_ok=True)
        programs = here / "bin"
        programs.mkdir()
        for name, text in (("offbeat", STAND_IN), ("sleep", "#!/bin/sh\nexec /bin/sleep 0.05\n")):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.watched, self.over = here / file, here / "work" / "home" / "over"
        self.watched.write_text("first")
        os.utime(self.watched, (1, 1))
        self.process = None

    def start(self, code=None):
        """Start the container, as kubelet does; with a code: the process in it ends with this code."""
        if code is not None:
            (self.here / "code").write_text(str(code))
        home = str(self.over.parent)
        environment = {"PATH": f"{self.here}/bin:/usr/bin:/bin", "HOME": home, "HERE": str(self.here)}
        words = ["/bin/sh", "-c", self._script, "part", "a", "b c"]
        self.process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        return self.process

    def line(self):
        return self.process.stdout.readline()

    def calls(self):
        return (self.here / "calls").read_text().splitlines()

    def close(self):
        if self.process is not None and not self.process.stdout.closed:
            self.process.terminate()
            self.process.communicate(timeout=60)


@pytest.fixture(params=["head", "generators"])
def container(request, tmp_path):
    file = "head.yaml" if request.param == "head" else "hosts.yaml"
    watched = "config/run.toml" if request.param == "head" else "run/offbeat/ticket"
    made = kubernetes.objects(job(), SITE.kubernetes)[file]
    part = next(
        one
        for one in made
        if one["metadata"]["name"] == f"offbeat-r-{request.param}" and "template" in one["spec"]
    )
    container = Container(tmp_path, watched, part["spec"]["template"])
    yield container
    container.close()


def test_a_container_whose_process_is_done_stays_and_does_nothing_until_a_launch(container):
    """Kubernetes starts again whatever ends: with 0 for a run that is over, and with 65 for one that cannot go on."""
    for code in (0, 65):
        container.start(code)
        assert container.line() == "started\n"
        said = container.line()
        assert said.startswith(f"nothing is left to do (code {code}): ")
        assert container.process.poll() is None
        assert container.over.read_text() == said
        # A launch brings another run file, or another ticket.
        container.watched.write_text(f"another, after {code}")
        assert container.process.wait(60) == 75, "kubelet starts it again"
        container.process.stdout.close()
    assert len(container.calls()) == 2
    container.start()
    assert container.line() == "started\n"
    assert not container.over.exists()


@pytest.mark.parametrize("code", [1, 75, 137])
def test_a_container_whose_process_is_not_done_ends_with_its_code(container, code):
    assert container.start(code).wait(60) == code
    assert not container.over.exists()


def test_sigterm_reaches_the_process_which_drains_and_ends_one_that_does_nothing_at_once(container):
    container.start()
    assert container.line() == "started\n"
    container.process.terminate()
    assert container.process.communicate(timeout=60)[0] == "drained\n"
    assert container.process.returncode == 75
    container.start(0)
    assert container.line() + container.line().partition(" (")[0] == "started\nnothing is left to do"
    container.process.terminate()
    assert container.process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("result", ["", "resumed", "over"])
def test_the_head_goes_on_from_its_volume_unless_the_run_is_over(tmp_path, result):
    (_, head) = kubernetes.objects(job(), SITE.kubernetes)["head.yaml"]
    container = Container(tmp_path, "config/run.toml", head["spec"]["template"])
    file = tmp_path / "work" / "runs" / "r" / "result.json"
    file.parent.mkdir(parents=True)
    if result:
        file.write_text(json.dumps({"run": result}))
    try:
        container.start()
        over = result == "over"
        assert container.line().startswith("nothing is left to do (code 0): copy" if over else "started")
        assert (tmp_path / "calls").exists() != over
        container.close()
        # Launched anew, with a newer run file, it trains on.
        os.utime(container.watched)
        if result:
            os.utime(file, (2, 2))
        container.start()
        assert container.line() == "started\n"
        assert container.calls()[-1] == f"train {tmp_path}/config/run.toml a b c --again"
    finally:
        container.close()


# --- the client -------------------------------------------------------------------------------------------

SECRET = "a-ticket-that-nobody-may-see"
KUBECTL = """
import json, pathlib, sys
folder = pathlib.Path(FOLDER)
words = [word for word in sys.argv[1:] if not word.startswith("--namespace=")]
given = "" if words[0] != "apply" or "--filename=-" not in words else sys.stdin.read()
with open(folder / "calls", "a") as calls:
    calls.write(json.dumps({"words": words, "given": given, "all": sys.argv[1:]}) + "\\n")
state = json.loads((folder / "state").read_text())
match words:
    case ["exec", _, "--", "test", *_]:
        sys.exit(0 if state.get("over") else 1)
    case ["exec", *_]:
        if not state.get("made"):
            (folder / "state").write_text(json.dumps(state | {"made": True}))
            sys.exit("error: the model of the run is not made yet")
        print(SECRET)
    case ["get", "pods", selector, _]:
        role = selector.rpartition("=")[2]
        pods = [{"metadata": {"name": f"offbeat-t-{role}-{n}", "creationTimestamp": f"2026-01-01T00:00:0{n}Z"},
                 "status": {"phase": "Running"}} for n in range(state[role])]
        print(json.dumps({"items": pods}))
    case ["get", what, _]:
        print(json.dumps({"spec": {"replicas": state[what.rpartition("-")[2]]}}))
    case ["scale", *what, replicas]:
        count = {one.rpartition("-")[2]: int(replicas.partition("=")[2]) for one in what}
        (folder / "state").write_text(json.dumps(state | count))
        print("scaled")
    case ["rollout", *_] if state.get("broken"):
        sys.exit("error: timed out waiting for the condition")
    case _:
        print("done by the cluster")
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A stand-in for kubectl with two Deployments, which notes how it was called."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    constants = f"FOLDER, SECRET = {str(tmp_path)!r}, {SECRET!r}"
    program.write_text(f"#!{sys.executable}\n{constants}\n{KUBECTL}")
    program.chmod(0o755)
    (tmp_path / "state").write_text(json.dumps({"generators": 3, "actors": 2}))
    (tmp_path / "site.toml").write_text('[kubernetes]\nimage = "i"\nnamespace = "team"\nmonitor = true\n')
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(kubectl, "TICKET_WAIT_S", 0.0)
    monkeypatch.setattr(kubectl, "LOOK_S", 0.0)
    monkeypatch.chdir(tmp_path)
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


LAUNCH = ["launch", "spell_backward", "--on", "kubernetes", "--site", "site.toml", "run.name=t"]


def test_launch_starts_the_head_first_and_carries_the_tickets_through_pipes(cluster, tmp_path, capfd):
    assert main(LAUNCH) == 0
    calls = cluster()
    verbs = [" ".join(call["words"][:2]) for call in calls]
    head = [f"--filename=runs/t.launch/{name}.yaml" for name in ("run", "head", "monitor")]
    assert calls[0]["words"] == ["apply", *head]
    assert verbs[1:3] == ["rollout status", "exec offbeat-t-head-0"]
    assert calls[-1]["words"] == ["apply", "--filename=runs/t.launch/hosts.yaml"]
    assert all(call["all"][0] == "--namespace=team" for call in calls)
    secrets = [json.loads(call["given"]) for call in calls if call["given"]]
    assert [one["metadata"]["name"] for one in secrets] == [
        "offbeat-t-generators-ticket", "offbeat-t-actors-ticket", "offbeat-t-metrics",
    ]  # fmt: skip
    # The first answer of the head was that it has no model yet, so it was asked again.
    assert len([verb for verb in verbs if verb.startswith("exec")]) == 5
    said = capfd.readouterr()
    everywhere = [said.out, said.err, *(json.dumps(call["all"]) for call in calls)]
    everywhere += [path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not any(SECRET in text for text in everywhere)
    assert "done by the cluster" in said.out
    assert launched_of(Path("runs/t")).options == ("--namespace=team",)


def test_scale_marks_the_youngest_and_uses_the_scale_subresource(cluster, capfd):
    assert main(LAUNCH) == 0
    before = len(cluster())
    assert main(["scale", "runs/t", "generators=2", "actors=+3"]) == 0
    words = [call["words"] for call in cluster()[before:]]
    assert [word for word in words if word[0] in ("annotate", "scale")] == [
        [
            "annotate",
            "--overwrite",
            "pod/offbeat-t-generators-2",
            "controller.kubernetes.io/pod-deletion-cost=-1",
        ],
        ["scale", "deployment/offbeat-t-generators", "--replicas=2"],
        # Two actors a pod: seven need four pods.
        ["scale", "deployment/offbeat-t-actors", "--replicas=4"],
    ]
    assert "generators: 3 in 3 pods now, 2 in 2 pods wanted" in capfd.readouterr().out
    assert main(["scale", "runs/t", "generators=-5"]) == 0
    assert cluster()[-1]["words"][-1] == "--replicas=1"


def test_drain_takes_one_pod_out_for_good(cluster):
    assert main(LAUNCH) == 0
    before = len(cluster())
    assert main(["drain", "runs/t", "g-offbeat-t-generators-0", "--wait", "7"]) == 0
    words = [call["words"] for call in cluster()[before:] if call["words"][0] != "get"]
    assert words == [
        [
            "annotate",
            "--overwrite",
            "pod/offbeat-t-generators-0",
            "controller.kubernetes.io/pod-deletion-cost=-1",
        ],
        ["scale", "deployment/offbeat-t-generators", "--replicas=2"],
        ["wait", "--for=delete", "pod/offbeat-t-generators-0", "--timeout=7s"],
    ]
    assert main(["drain", "runs/t", "gpu7"]) == 1


def test_wait_ends_the_hosts_of_a_run_that_is_over_and_stop_deletes_all_but_the_volume(cluster, tmp_path):
    state = tmp_path / "state"
    state.write_text(json.dumps({"generators": 1, "actors": 1, "over": True}))
    assert main([*LAUNCH, "--wait"]) == 0
    assert json.loads(state.read_text()) | {"made": True} == {
        "generators": 0, "actors": 0, "over": True, "made": True,
    }  # fmt: skip
    assert main(["launch", "--stop", "runs/t"]) == 0
    words = cluster()[-1]["words"]
    assert words[:2] == ["delete", kubectl.KINDS]
    assert "persistentvolumeclaim" not in kubectl.KINDS
    assert words[2] == "--selector=app.kubernetes.io/name=offbeat,app.kubernetes.io/instance=t"


def test_a_head_that_does_not_answer_and_a_missing_kubectl_end_with_their_answers(
    cluster, tmp_path, capfd, monkeypatch
):
    (tmp_path / "state").write_text(json.dumps({"broken": True}))
    assert main(LAUNCH) == 1
    assert "timed out waiting" in (said := capfd.readouterr().err)
    assert "kubectl describe pod offbeat-t-head-0" in said
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert shutil.which("kubectl") is None
    assert main(LAUNCH) == 1
    assert "there is no such program here" in capfd.readouterr().err
    assert issubclass(EngineFailed, Exception)


# --- the probe --------------------------------------------------------------------------------------------


def written(folder, keys=""):
    folder.mkdir(parents=True)
    config = {"broker": {"http": "0.0.0.0:5756"}, "security": {"keys": keys, "encrypt": True}}
    (folder / "config.json").write_text(json.dumps(config))


def test_the_probe_asks_the_broker_of_the_head_or_of_the_newest_host(tmp_path, monkeypatch, capsys):
    run = tmp_path / "runs" / "r"
    with pytest.raises(FileNotFoundError):
        probe.settings("host", run)
    written(run)
    assert probe.settings("head", run) == ("0.0.0.0:5756", run / "keys", "")
    written(run / "hosts" / "g-pod", keys="/k")
    assert probe.settings("host", run) == ("0.0.0.0:5756", Path("/k"), "g-pod")

    answers = [{"hosts": []}, {"hosts": [{"name": "g-pod", "generators": 1, "actors": 0}]}]
    monkeypatch.setattr(probe, "fetch", lambda *_, **__: answers.pop(0))
    assert [probe.main(["host", str(run)]) for _ in range(2)] == [1, 0]

    def silent(*_, **__):
        raise NoAnswer("https://0.0.0.0:5756/status: refused")

    monkeypatch.setattr(probe, "fetch", silent)
    assert probe.main(["head", str(run)]) == 1
    assert "refused" in capsys.readouterr().out

    # A container that does nothing any more asks nobody.
    (tmp_path / probe.OVER).write_text("nothing is left to do (code 65): look\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert probe.main(["host", str(run)]) == 1
    assert capsys.readouterr().out == "not ready: nothing is left to do (code 65): look\n"
