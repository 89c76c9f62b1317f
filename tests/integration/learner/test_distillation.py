"""A policy is taught on its own samples by the real engine: by a teacher in a folder, and by one behind a URL."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.errors import ModelUnusable, TeacherFailed
from learner.settings.learner import LearnerConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from learner.update.teacher import RemoteTeacher
from tests.integration.learner.tiny_qwen3 import VOCAB, save, tiny_model
from tests.trajectories import batch_of, make_batch_of_groups, make_trajectory

KL = "learner/kl_proximal_teacher_nats"
PROMPT, ACTIONS = [3, 4, 5, 6], 8


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return str(save(tiny_model(tied=True, seed=8), tmp_path_factory.mktemp("teacher")))


@pytest.fixture
def start(model, engines):
    def make(lr=3e-3, **settings):
        config = LearnerConfig.model_validate(
            {
                "algorithm": {"distillation": settings},
                "optimizer": OptimizerConfig(lr=lr),
                "micro_batch_tokens": 400,
                "max_policy_lag": 4,
            }
        )
        engines.append(TrainingEngine(config, model=model, total_steps=100, seed=5))
        return engines[-1]

    return make


@torch.no_grad()
def sampled(lm, count, step):
    """Return trajectories that the policy samples now, all with the return 0."""
    ids = torch.tensor([PROMPT] * count)
    generator, logps = torch.Generator().manual_seed(step), []
    for _ in range(ACTIONS):
        logp = lm(input_ids=ids).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        logps.append(logp.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    behaviour = torch.cat(logps, dim=1).numpy()
    return [
        make_trajectory(
            f"s{step}-{i}", group=f"g{step}", actions=ACTIONS, logp=behaviour[i], version=step,
            token_ids=ids[i].numpy().astype(np.int32), group_size=count,
        )
        for i in range(count)
    ]  # fmt: skip


def test_a_policy_learns_from_a_teacher_without_any_reward(start, teacher):
    engine, distances = start(teacher=teacher), []
    for step in range(30):
        trajectories = sampled(engine.deepspeed.module.lm, 64, step)
        distances.append(engine.update(trajectories, current_version=step).metrics[KL])
    assert np.mean(distances[:3]) > 2.0
    assert np.mean(distances[-3:]) < np.mean(distances[:3]) / 2


def test_a_teacher_is_not_in_checkpoints_and_a_run_goes_on_with_it(start, teacher, tmp_path):
    engine = start(teacher=teacher)
    batch = make_batch_of_groups(2, 3)
    engine.update(batch, current_version=0)
    engine.save(tmp_path, {"step": 1})
    assert not list(tmp_path.rglob("teacher*"))
    expected = engine.update(batch, current_version=0).metrics
    again = start(teacher=teacher)
    assert again.load(tmp_path) == {"step": 1}
    assert again.update(batch, current_version=0).metrics[KL] == expected[KL]


def test_a_teacher_with_other_tokens_is_refused(start, tmp_path):
    small = tiny_model(tied=True, seed=1)
    small.resize_token_embeddings(VOCAB - 8)
    save(small, tmp_path / "small")
    with pytest.raises(ModelUnusable, match=rf"with {VOCAB - 8} tokens, but .* has {VOCAB}; take a teacher"):
        start(teacher=str(tmp_path / "small"))


class Server:
    """A server of the completions interface that computes with a model; the script has its first statuses."""

    def __init__(self, folder, *script, cut=0):
        self.script, self.cut, self.asked = list(script), cut, []
        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append((self.path, self.headers.get("Authorization"), body))
                status = server.script.pop(0) if server.script else 200
                data = json.dumps(server.answer(body["prompt"])).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)

    @torch.no_grad()
    def answer(self, ids):
        logp = self.lm(torch.tensor([ids])).logits[0].log_softmax(-1)
        told = [None, *(float(logp[i, token]) for i, token in enumerate(ids[1:])), -1.0]
        return {"choices": [{"logprobs": {"token_logprobs": told[self.cut :]}}]}

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(60)


def asked(server, **settings):
    config = LearnerConfig.model_validate(
        {
            "algorithm": {
                "distillation": {"teacher": server.url, "model": "big", "timeout_s": 60.0, **settings}
            }
        }
    )
    return RemoteTeacher(config.algorithm.distillation, torch.device("cpu"))


def test_a_teacher_behind_a_url_teaches_the_same(start, teacher, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    batch = make_batch_of_groups(3, 4)
    local = start(teacher=teacher).update(batch, current_version=0).metrics
    with Server(teacher, 503) as server:
        remote = start(teacher=server.url, model="big").update(batch, current_version=0).metrics
    for name in (KL, "learner/loss", "learner/gradient_norm"):
        assert remote[name] == pytest.approx(local[name], rel=1e-4, abs=1e-6)
    # One request for each trajectory, and the first one again.
    assert len(server.asked) == len(batch) + 1
    path, key, body = server.asked[0]
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert {name: body[name] for name in ("model", "echo", "logprobs")} == {
        "model": "big",
        "echo": True,
        "logprobs": 1,
    }


@pytest.mark.parametrize(
    ("script", "cut", "words"),
    [
        (
            [401],
            0,
            r"teacher big at http.*HTTP status 401: .*correct learner.algorithm.distillation, or the key",
        ),
        ([], 3, "has no log-probability of each of"),
        ([503] * 99, 0, "no log-probabilities within .*timeout_s = 3 s: HTTP status 503"),
    ],
)
def test_a_server_that_gives_no_log_probabilities_ends_the_update(teacher, script, cut, words):
    batch = batch_of(make_batch_of_groups(1, 2))
    with Server(teacher, *script, cut=cut) as server:
        remote = asked(server, timeout_s=3.0 if len(script) > 1 else 60.0)
        with pytest.raises(TeacherFailed, match=words):
            remote._of_places(batch, np.flatnonzero(batch.seen_mask))


def test_a_server_that_redirects_elsewhere_does_not_pass_the_key_on(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    seen = []

    class Redirects(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirects) as http:
        http.url = f"http://127.0.0.1:{http.server_port}/v1"
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            with pytest.raises(TeacherFailed, match="404"):
                asked(http)._ask([1, 2], time.monotonic() + 30.0)
        finally:
            http.shutdown()
            thread.join(30)
    assert seen == [("/v1/completions", "Bearer secret"), ("/elsewhere", None)]
