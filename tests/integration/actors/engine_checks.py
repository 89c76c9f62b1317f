"""Generators under test whose versions are known models, and the checks that hold on every device.

`test_generator_engine` makes them on vLLM's CPU engine, and `tests/gpu/test_engine_on_gpu.py` on a GPU. Each compares
an answer with a transformers forward pass of the model version that its tokens claim. The models are random and far
apart: a token with a wrong stamp or a wrong computation is nats off.
"""

import inspect
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from actors.config import GeneratorConfig
from protocol.processes import VARIABLE, GpuLock
from protocol.weights.format import DATA
from tests.integration.actors.generator_harness import Answer, Running, children, engine_process, gone
from tests.integration.learner.tiny_qwen3 import VOCAB, greedy, publish, save, score, tiny_model

# This stop token cannot occur. It takes the place of the end token, which random models often sample.
NEVER = [VOCAB]
PROMPT = [3, 4, 5, 6, 7]
LONG_PROMPT = [3 + i * i % 40 for i in range(100)]  # several full blocks of the prefix cache
PROCESS_ENDS_S = 240.0


@dataclass(frozen=True)
class Arithmetic:
    """How exactly an engine computes."""

    dtype: torch.dtype = torch.float32
    """Float type in which the weights are exact."""
    tolerance: float = 1e-4
    """Largest error of a log-probability, in nats."""
    exact: bool = True
    """Whether equal prompts get equal bits, and the most likely token is that of transformers."""
    answer_tokens: int = 900
    """Tokens of an answer during which three versions come: more on an engine that is faster."""


FLOAT32 = Arithmetic()
BFLOAT16 = Arithmetic(torch.bfloat16, tolerance=0.6, exact=False, answer_tokens=1900)
"""The tolerance is three times the error of transformers in bfloat16, see `test_engine_checks`."""


class Policies:
    """The model of each version, made from the version's number."""

    def __init__(self, *, tied: bool, intermediate: int = 192, dtype: torch.dtype = torch.float32) -> None:
        self._model = {"tied": tied, "intermediate": intermediate}
        self._dtype = dtype
        self._models = {}

    def __getitem__(self, version: int):
        if version not in self._models:
            self._models[version] = tiny_model(seed=version, **self._model).to(self._dtype).float()
        return self._models[version]

    def largest_error(self, prompt: list[int], answer: Answer) -> float:
        """Return the largest error of a log-probability, compared with the version that its token claims."""
        assert len(answer.ids) == len(answer.logps) == len(answer.versions) > 0
        scores = {version: score(self[version], prompt, answer.ids) for version in set(answer.versions)}
        claimed = zip(answer.logps, answer.versions, strict=True)
        return max(abs(logp - scores[version][i]) for i, (logp, version) in enumerate(claimed))


class Lab:
    """A running generator, its possible policies, and the newest published version."""

    def __init__(
        self,
        config: GeneratorConfig,
        folder: Path,
        *,
        tied: bool,
        intermediate: int = 192,
        arithmetic: Arithmetic = FLOAT32,
        **broker,
    ) -> None:
        self.config = config
        self.arithmetic = arithmetic
        self.root = folder / "published"
        self.policies = Policies(tied=tied, intermediate=intermediate, dtype=arithmetic.dtype)
        self.running = Running(config, save(self.policies[0], folder / "model"), **broker)
        self.version = 0

    def publish(self, **flaws) -> tuple[Path, int]:
        self.version += 1
        return publish(self.policies[self.version], self.root, version=self.version, **flaws), self.version

    def update(self) -> int:
        manifest, version = self.publish()
        self.running.update(manifest, version=version)
        return version

    def answer_through_updates(self, request_id: str, *, updates: int, max_tokens: int) -> Answer:
        actor = self.running.actor(f"through-{request_id}")
        actor.ask(request_id, PROMPT, max_tokens=max_tokens, stop_token_ids=NEVER, seed=3)
        for i in range(updates):
            tokens = (i + 1) * 20
            self.running.until(lambda tokens=tokens: len(actor.answers[request_id].ids) >= tokens)
            self.update()
        self.running.until(lambda: actor.answers[request_id].finish_reason != "")
        return actor.answers[request_id]

    def assert_sampled_by_claimed_versions(self, prompt: list[int], answer: Answer) -> None:
        """Compare each token with the version that it claims."""
        assert self.policies.largest_error(prompt, answer) < self.arithmetic.tolerance

    def gauge(self, name: str) -> float:
        return self.running.broker.beat.gauges.get(name, 0.0)

    def told(self, name: str, above: float) -> bool:
        """Return whether any heartbeat had a gauge above a number."""
        return any(gauges.get(name, 0.0) > above for gauges in self.running.broker.told)

    def close(self) -> None:
        """Send SIGTERM during a request: the partial answer is sent, and no process stays behind."""
        actor = self.running.actor("last")
        actor.ask("last", PROMPT, max_tokens=1000, stop_token_ids=NEVER)
        last = actor.answers["last"]
        self.running.until(lambda: len(last.ids) >= 10)
        engine = engine_process(self.running.process.pid)
        self.running.process.terminate()
        self.running.until(lambda: self.running.broker.goodbye is not None and last.finish_reason != "")
        self.running.process.join(120.0)
        exitcode = self.running.process.exitcode
        self.running.close()
        assert (last.finish_reason, exitcode) == ("abort", 0)
        assert len(last.ids) < 1000
        assert gone(engine)


def truncate(data: Path) -> None:
    """Take the last bytes of a version away."""
    data.write_bytes(data.read_bytes()[:-4])


def alter(data: Path) -> None:
    """Change a bit of a version."""
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(bytes(raw))


BAD_WEIGHTS = pytest.mark.parametrize(
    ("flaws", "damage"),
    [
        ({}, truncate),
        ({}, alter),
        ({"flat": "model.layers.1.mlp.up_proj.weight"}, None),
        ({"without": "model.layers.0.self_attn.k_proj.weight"}, None),
    ],
    ids=["truncated", "altered", "wrong shape", "missing tensor"],
)


def check_spans(lab: Lab) -> None:
    """Let three versions come during an answer: each token names the version that sampled it."""
    tokens = lab.arithmetic.answer_tokens
    answer = lab.answer_through_updates("swap", updates=3, max_tokens=tokens)
    assert len(set(answer.versions)) == 4
    assert answer.versions == sorted(answer.versions)
    assert answer.finish_reason == "length"
    assert len(answer.ids) == tokens
    assert answer.kv == "recomputed"
    lab.assert_sampled_by_claimed_versions(PROMPT, answer)


def check_updated(lab: Lab) -> None:
    """Update between two greedy answers to one prompt: the second reads nothing that the first has cached."""
    actor = lab.running.actor("prefix")
    lab.running.ask(actor, "before", LONG_PROMPT, max_tokens=4, temperature=0.0, stop_token_ids=NEVER)
    version = lab.update()
    after = lab.running.ask(actor, "after", LONG_PROMPT, max_tokens=40, temperature=0.0, stop_token_ids=NEVER)
    assert set(after.versions) == {version}
    if lab.arithmetic.exact:
        assert after.ids == greedy(lab.policies[version], LONG_PROMPT, 40)
    lab.assert_sampled_by_claimed_versions(LONG_PROMPT, after)


def behind(model, ids, cache=None):
    """Return logits of tokens that come behind those of a cache, and the cache with them."""
    # Newer versions of transformers have another name for it, as an argument and in the output.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    output = model(torch.tensor([ids]), use_cache=True, **{name: cache})
    return output.logits, output[name]


@torch.no_grad()
def check_kept(lab: Lab) -> None:
    """Update during an answer whose cache is kept: later tokens are computed on what the earlier version cached."""
    answer = lab.answer_through_updates("kept", updates=1, max_tokens=lab.arithmetic.answer_tokens)
    assert answer.kv == "kept"
    before, after = sorted(set(answer.versions))
    switch = answer.versions.index(after)
    early, late = lab.policies[before], lab.policies[after]
    ids = PROMPT + answer.ids
    # The new version is the first to compute the last token that the old version sampled.
    cut = len(PROMPT) + switch - 1
    _, cache = behind(early, ids[:cut])
    logits, _ = behind(late, ids[cut:], cache)
    logps = torch.log_softmax(logits[0], dim=-1)
    mixed = [logps[i, token].item() for i, token in enumerate(answer.ids[switch:])]
    near = lab.arithmetic.tolerance
    assert answer.logps[:switch] == pytest.approx(score(early, PROMPT, answer.ids)[:switch], abs=near)
    assert answer.logps[switch:] == pytest.approx(mixed, abs=near)


def check_refused(lab: Lab, flaws: dict[str, str], damage: Callable[[Path], None] | None) -> None:
    """Announce bad weights: they are refused while sampling goes on, and good ones follow."""
    in_service = lab.running.broker.beat.policy_version
    refused = lab.gauge("updates_refused_total")
    manifest, bad = lab.publish(**flaws)
    if damage:
        damage(manifest.with_name(DATA))
    lab.running.broker.announce(manifest, version=bad)
    lab.running.until(lambda: lab.gauge("updates_refused_total") == refused + 1)
    answer = lab.running.ask(lab.running.actor("bad"), f"bad-{bad}", PROMPT, stop_token_ids=NEVER)
    assert set(answer.versions) == {in_service}
    lab.assert_sampled_by_claimed_versions(PROMPT, answer)
    good = lab.update()
    answer = lab.running.ask(lab.running.actor("good"), f"good-{good}", PROMPT, stop_token_ids=NEVER)
    assert set(answer.versions) == {good}
    lab.assert_sampled_by_claimed_versions(PROMPT, answer)


def check_aborted(lab: Lab) -> None:
    """Abort an answer: what it has is returned, and can be continued."""
    actor = lab.running.actor("aborts")
    actor.ask("abort", PROMPT, max_tokens=900, stop_token_ids=NEVER)
    lab.running.until(lambda: len(actor.answers["abort"].ids) >= 20)
    actor.abort("abort")
    lab.running.until(lambda: actor.answers["abort"].finish_reason != "")
    answer = actor.answers["abort"]
    assert answer.finish_reason == "abort"
    assert 20 <= len(answer.ids) < 900
    lab.assert_sampled_by_claimed_versions(PROMPT, answer)
    # A continuation of the partial answer has the policy's log-probabilities, too.
    prefix = PROMPT + answer.ids
    more = lab.running.ask(actor, "resumed", prefix, max_tokens=20, stop_token_ids=NEVER)
    lab.assert_sampled_by_claimed_versions(prefix, more)


def check_sleep(config: GeneratorConfig, folder: Path, *, arithmetic: Arithmetic = FLOAT32) -> None:
    """Want the GPU between two answers to one prompt, as the learner does: the engine sleeps, and wakes unchanged."""
    lock, own = GpuLock(folder / "gpu-lock"), config.model_copy(update={"sleep_in_updates": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder / "gpu-lock"))
        lab = Lab(own, folder, tied=True, arithmetic=arithmetic)
    settings = {"max_tokens": 40, "temperature": 0.0, "stop_token_ids": NEVER}
    try:
        actor = lab.running.actor()
        before = lab.running.ask(actor, "before", LONG_PROMPT, **settings)
        awake_bytes = used_bytes()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lock.wait_alone, PROCESS_ENDS_S)
            lab.running.until(waiting.done)
            waiting.result()
        if awake_bytes:
            # The KV cache is most of what the engine had. Other engines of the tests may be awake.
            assert awake_bytes - used_bytes() > config.gpu_memory_utilization / 2 * gpu_bytes()
        actor.ask("during", LONG_PROMPT, **settings)
        lab.running.until(lambda: lab.gauge("asleep_seconds_total") > 0.5)
        assert actor.answers["during"].ids == []
        lock.release()
        lab.running.until(lambda: actor.answers["during"].finish_reason != "")
        during = actor.answers["during"]
        if lab.arithmetic.exact:
            assert (during.ids, during.logps) == (before.ids, before.logps)
        lab.assert_sampled_by_claimed_versions(LONG_PROMPT, during)
        assert lock.wait_alone(PROCESS_ENDS_S) >= 0
        lock.release()
        version = lab.update()
        after = lab.running.ask(actor, "after", LONG_PROMPT, **settings)
        assert set(after.versions) == {version}
        lab.assert_sampled_by_claimed_versions(LONG_PROMPT, after)
    finally:
        lock.close()
        lab.running.close()


def used_bytes() -> int:
    """Return the bytes of the first GPU that any process uses; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def gpu_bytes() -> int:
    """Return the bytes of the first GPU."""
    return torch.cuda.mem_get_info(0)[1]


def check_late_joiner_and_lost_engine(
    config: GeneratorConfig, folder: Path, *, arithmetic: Arithmetic = FLOAT32
) -> None:
    """Start behind version 1, catch up, and kill the engine: the request that is lost gets an error."""
    lab = Lab(config, folder, tied=True, arithmetic=arithmetic, policy_version=1)
    try:
        actor = lab.running.actor()
        actor.ask("early", PROMPT, max_tokens=8, temperature=0.0, stop_token_ids=NEVER)
        lab.running.until(lambda: lab.gauge("held_requests") == 1)
        lab.update()
        lab.running.until(lambda: actor.answers["early"].finish_reason != "")
        early = actor.answers["early"]
        assert set(early.versions) == {1}
        lab.assert_sampled_by_claimed_versions(PROMPT, early)
        actor.ask("lost", PROMPT, max_tokens=1000, stop_token_ids=NEVER)
        lab.running.until(lambda: len(actor.answers["lost"].ids) > 0)
        os.kill(engine_process(lab.running.process.pid), signal.SIGKILL)
        deadline = time.monotonic() + PROCESS_ENDS_S
        while lab.running.process.is_alive() and time.monotonic() < deadline:
            lab.running.poll()
        lab.running.process.join(5.0)
        lab.running.poll()
        assert lab.running.process.exitcode == 1
        assert actor.answers["lost"].finish_reason == "abort"
        assert "the generator has failed" in actor.answers["lost"].error
        assert lab.running.broker.goodbye is not None
    finally:
        lab.running.close()


def check_fresh_engine_and_killed_generator(lab: Lab, folder: Path) -> None:
    """Compare an updated engine with a fresh one, and kill the fresh generator: it leaves no engine."""
    version = lab.update()
    fresh = Running(lab.config, save(lab.policies[version], folder / "model"))
    try:
        settings = {"max_tokens": 60, "temperature": 0.0, "stop_token_ids": NEVER}
        expected = fresh.ask(fresh.actor(), "fresh", LONG_PROMPT, **settings)
        answer = lab.running.ask(lab.running.actor("updated"), "updated", LONG_PROMPT, **settings)
        if lab.arithmetic.exact:
            assert answer.ids == expected.ids
            assert answer.logps == expected.logps
        lab.assert_sampled_by_claimed_versions(LONG_PROMPT, answer)
        assert max_error(lab.policies[version], expected) < lab.arithmetic.tolerance
        engine = engine_process(fresh.process.pid)
        family = [engine, *children(engine)]
        fresh.process.kill()
        fresh.process.join()
        deadline = time.monotonic() + PROCESS_ENDS_S
        while not all(map(gone, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in family if not gone(pid)] == []
    finally:
        fresh.close()


def max_error(model: torch.nn.Module, answer: Answer) -> float:
    """Return the largest error of a log-probability of an answer to the long prompt."""
    expected = score(model, LONG_PROMPT, answer.ids)
    return max(abs(logp - other) for logp, other in zip(answer.logps, expected, strict=True))
