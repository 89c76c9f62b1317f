"""Test the generator process with a real vLLM engine, over real sockets.

The tests compare each answer with a transformers forward pass of the model version that its tokens claim.
The models are random and far apart: a token with a wrong stamp or a wrong computation is nats off.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from actors.config import GeneratorConfig
from protocol.weights.format import DATA
from tests.integration.actors.generator_harness import Answer, Running, children, engine_process, gone
from tests.integration.actors.stopping import check_stop_string
from tests.integration.learner.tiny_qwen3 import EOS, VOCAB, greedy, publish, save, score, tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLERANCE = 1e-4
# This stop token cannot occur. It takes the place of the end token, which random models often sample.
NEVER = [VOCAB]
PROMPT = [3, 4, 5, 6, 7]
LONG_PROMPT = [3 + i * i % 40 for i in range(100)]  # several full blocks of the prefix cache
CONFIG = GeneratorConfig(kv_cache_mb=64)


class Policies:
    """The model of each version, made from the version's number."""

    def __init__(self, *, tied: bool, intermediate: int) -> None:
        self._model = {"tied": tied, "intermediate": intermediate}
        self._models = {}

    def __getitem__(self, version: int):
        if version not in self._models:
            self._models[version] = tiny_model(seed=version, **self._model)
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
        self, config: GeneratorConfig, folder: Path, *, tied: bool, intermediate: int = 192, **broker
    ) -> None:
        self.root = folder / "published"
        self.policies = Policies(tied=tied, intermediate=intermediate)
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


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    lab = Lab(CONFIG, tmp_path_factory.mktemp("tied"), tied=True)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    config = CONFIG.model_copy(update={"kv_on_update": "kept"})
    lab = Lab(config, tmp_path_factory.mktemp("kept"), tied=False)
    yield lab
    lab.close()


def test_tokens_come_in_chunks_and_the_end_token_is_one_of_them(tied):
    actor = tied.running.actor()
    for i in range(8):
        actor.ask(f"end-{i}", PROMPT, max_tokens=300, seed=i)
    tied.running.until(lambda: all(a.finish_reason for a in actor.answers.values()))
    answers = list(actor.answers.values())
    stopped = [answer for answer in answers if answer.finish_reason == "stop"]
    assert stopped
    assert all(answer.ids[-1] == EOS and EOS not in answer.ids[:-1] for answer in stopped)
    assert all(answer.chunks >= len(answer.ids) // CONFIG.stream_interval for answer in answers)
    assert max(tied.policies.largest_error(PROMPT, answer) for answer in answers) < TOLERANCE


def test_a_turn_ends_with_the_token_that_completes_a_stop_string(tied):
    check_stop_string(tied.running)


def test_the_same_seed_gives_the_same_tokens_and_temperature_enters_the_log_probability(tied):
    actor = tied.running.actor("seeds")
    settings = {"max_tokens": 24, "temperature": 0.7, "seed": 11, "stop_token_ids": NEVER}
    first = tied.running.ask(actor, "seed-1", PROMPT, **settings)
    second = tied.running.ask(actor, "seed-2", PROMPT, **settings)
    assert first.ids == second.ids
    logits = tied.policies[first.versions[0]](torch.tensor([PROMPT + first.ids])).logits[0] / 0.7
    logps = torch.log_softmax(logits, dim=-1)
    expected = [logps[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(first.ids)]
    assert first.logps == pytest.approx(expected, abs=TOLERANCE)


def test_weights_change_in_mid_sequence_and_every_token_says_which(tied):
    answer = tied.answer_through_updates("swap", updates=3, max_tokens=300)
    assert len(set(answer.versions)) == 4
    assert answer.versions == sorted(answer.versions)
    assert answer.finish_reason == "length"
    assert len(answer.ids) == 300
    assert answer.kv == "recomputed"
    assert tied.policies.largest_error(PROMPT, answer) < TOLERANCE


def test_many_seeded_requests_survive_an_update_that_recomputes_them(tied):
    """Recomputed prefixes exceed one engine step, so vLLM discards sampled tokens, which once killed it."""
    actor = tied.running.actor("seeded")
    recomputed = tied.gauge("recomputed_total")
    for i in range(64):
        actor.ask(f"seeded-{i}", LONG_PROMPT, max_tokens=400, seed=i, stop_token_ids=NEVER)
    answers = list(actor.answers.values())
    tied.running.until(lambda: all(len(answer.ids) >= 40 for answer in answers))
    tied.update()
    tied.running.until(lambda: all(answer.finish_reason for answer in answers))
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert all(len(set(answer.versions)) == 2 for answer in answers)
    assert tied.policies.largest_error(LONG_PROMPT, answers[0]) < TOLERANCE
    tied.running.until(lambda: tied.gauge("idle_share") == 1.0)
    assert tied.gauge("recomputed_total") >= recomputed + 32


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Yield a Lab like `tied`, but with no memory allowed for keeping the plain weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFBEAT_KEPT_WEIGHTS_MB", "0")
        lab = Lab(CONFIG, tmp_path_factory.mktemp("reloaded"), tied=True)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def broad(tmp_path_factory):
    """Yield a Lab like `tied`, with a model so large (25 MB) that several threads write it."""
    lab = Lab(CONFIG, tmp_path_factory.mktemp("broad"), tied=True, intermediate=8192)
    yield lab
    lab.close()


@pytest.mark.parametrize("lab", ["tied", "kept", "reloaded", "broad"])
def test_after_an_update_the_engine_is_the_policy_and_reads_no_stale_prefix(lab, request):
    lab = request.getfixturevalue(lab)  # tied weights with recomputed KV, untied weights with kept KV
    actor = lab.running.actor("prefix")
    lab.running.ask(actor, "before", LONG_PROMPT, max_tokens=4, temperature=0.0, stop_token_ids=NEVER)
    version = lab.update()
    after = lab.running.ask(actor, "after", LONG_PROMPT, max_tokens=40, temperature=0.0, stop_token_ids=NEVER)
    assert set(after.versions) == {version}
    assert after.ids == greedy(lab.policies[version], LONG_PROMPT, 40)
    assert lab.policies.largest_error(LONG_PROMPT, after) < TOLERANCE


@torch.no_grad()
def test_with_kept_kv_later_tokens_are_computed_on_what_the_earlier_version_cached(kept):
    answer = kept.answer_through_updates("kept", updates=1, max_tokens=120)
    assert answer.kv == "kept"
    before, after = sorted(set(answer.versions))
    switch = answer.versions.index(after)
    early, late = kept.policies[before], kept.policies[after]
    ids = PROMPT + answer.ids
    # The new version is the first to compute the last token that the old version sampled.
    cut = len(PROMPT) + switch - 1
    cache = early(torch.tensor([ids[:cut]]), use_cache=True).past_key_values
    logits = late(torch.tensor([ids[cut:]]), past_key_values=cache).logits[0]
    logps = torch.log_softmax(logits, dim=-1)
    mixed = [logps[i, token].item() for i, token in enumerate(answer.ids[switch:])]
    assert answer.logps[:switch] == pytest.approx(score(early, PROMPT, answer.ids)[:switch], abs=TOLERANCE)
    assert answer.logps[switch:] == pytest.approx(mixed, abs=TOLERANCE)


def truncate(data: Path) -> None:
    data.write_bytes(data.read_bytes()[:-4])


def alter(data: Path) -> None:
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("flaws", "damage"),
    [
        ({}, truncate),
        ({}, alter),
        ({"flat": "model.layers.1.mlp.up_proj.weight"}, None),
        ({"without": "model.layers.0.self_attn.k_proj.weight"}, None),
    ],
    ids=["truncated", "altered", "wrong shape", "missing tensor"],
)
def test_bad_weights_are_refused_while_sampling_goes_on_and_good_ones_follow(tied, flaws, damage):
    in_service = tied.running.broker.beat.policy_version
    refused = tied.gauge("updates_refused_total")
    manifest, bad = tied.publish(**flaws)
    if damage:
        damage(manifest.with_name(DATA))
    tied.running.broker.announce(manifest, version=bad)
    tied.running.until(lambda: tied.gauge("updates_refused_total") == refused + 1)
    answer = tied.running.ask(tied.running.actor("bad"), f"bad-{bad}", PROMPT, stop_token_ids=NEVER)
    assert set(answer.versions) == {in_service}
    assert tied.policies.largest_error(PROMPT, answer) < TOLERANCE
    good = tied.update()
    answer = tied.running.ask(tied.running.actor("good"), f"good-{good}", PROMPT, stop_token_ids=NEVER)
    assert set(answer.versions) == {good}
    assert tied.policies.largest_error(PROMPT, answer) < TOLERANCE


def test_a_lower_version_is_refused(tied):
    manifest, first = tied.publish()
    version = tied.update()
    refused = tied.gauge("updates_refused_total")
    tied.running.broker.announce(manifest, version=first)
    tied.running.until(lambda: tied.gauge("updates_refused_total") == refused + 1)
    assert tied.running.broker.beat.policy_version == version


def test_an_aborted_request_returns_what_it_has(tied):
    actor = tied.running.actor("aborts")
    actor.ask("abort", PROMPT, max_tokens=900, stop_token_ids=NEVER)
    tied.running.until(lambda: len(actor.answers["abort"].ids) >= 20)
    actor.abort("abort")
    tied.running.until(lambda: actor.answers["abort"].finish_reason != "")
    answer = actor.answers["abort"]
    assert answer.finish_reason == "abort"
    assert 20 <= len(answer.ids) < 900
    assert tied.policies.largest_error(PROMPT, answer) < TOLERANCE
    # A continuation of the partial answer has the policy's log-probabilities, too.
    prefix = PROMPT + answer.ids
    more = tied.running.ask(actor, "resumed", prefix, max_tokens=20, stop_token_ids=NEVER)
    assert tied.policies.largest_error(prefix, more) < TOLERANCE


def test_a_request_waits_for_the_version_it_asks_for(tied):
    actor = tied.running.actor("waits")
    manifest, version = tied.publish()
    actor.ask("held", PROMPT, max_tokens=8, min_policy_version=version, stop_token_ids=NEVER)
    actor.ask("dropped", PROMPT, max_tokens=8, min_policy_version=version, stop_token_ids=NEVER)
    tied.running.until(lambda: tied.gauge("held_requests") == 2)
    assert not tied.running.broker.beat.busy
    actor.abort("dropped")
    tied.running.until(lambda: actor.answers["dropped"].finish_reason == "abort")
    assert actor.answers["held"].chunks == 0
    tied.running.update(manifest, version=version)
    tied.running.until(lambda: actor.answers["held"].finish_reason == "length")
    assert set(actor.answers["held"].versions) == {version}


@pytest.mark.parametrize(
    ("prompt", "said"), [([], "empty"), ([VOCAB], "vocabulary of 48"), ([3] * 1024, "max_model_len = 1024")]
)
def test_an_impossible_request_is_answered_with_its_error(tied, prompt, said):
    answer = tied.running.ask(tied.running.actor("errors"), f"error-{said}", prompt)
    assert answer.finish_reason == "error"
    assert said in answer.error
    assert tied.running.ask(tied.running.actor("errors-after"), "fine", PROMPT, max_tokens=2).finish_reason


def test_an_answer_ends_with_the_context_length(tied):
    prompt = [3] * 1020
    answer = tied.running.ask(tied.running.actor("long"), "long", prompt, max_tokens=64, stop_token_ids=NEVER)
    assert answer.finish_reason == "length"
    assert len(answer.ids) == 4


def test_a_heartbeat_tells_progress_and_the_last_pause(tied):
    tied.update()
    tied.running.until(lambda: tied.gauge("policy_version") == tied.version)
    beat = tied.running.broker.beat
    # Progress is the engine's steps. Several requests may get a token in one step.
    assert beat.progress > 0
    assert tied.gauge("tokens_total") > 0
    assert 0 < tied.gauge("update_pause_seconds") < 5
    assert tied.gauge("updates_applied_total") >= 1
    tied.running.until(lambda: tied.gauge("idle_share") == 1.0)
    assert tied.gauge("tokens_per_second") == 0.0


def test_a_heartbeat_tells_of_a_cache_that_is_full_and_of_prompts_that_were_cached(tmp_path):
    """The keys and values of 64 answers of 400 tokens take 25 MB, but the cache has 16 MB."""
    lab = Lab(CONFIG.model_copy(update={"kv_cache_mb": 16}), tmp_path, tied=True)
    try:
        actor = lab.running.actor()
        for i in range(64):
            actor.ask(f"many-{i}", LONG_PROMPT, max_tokens=400, seed=i, stop_token_ids=NEVER)
        lab.running.until(lambda: lab.told("kv_cache_share", 0.9) and lab.told("waiting_requests", 0.99))
        lab.running.until(lambda: all(answer.finish_reason for answer in actor.answers.values()))
        lab.running.until(lambda: lab.gauge("idle_share") == 1.0)
        assert lab.gauge("recomputed_total") > 0
        assert lab.gauge("kv_cache_share") == lab.gauge("waiting_requests") == 0.0
        actor.ask("again", LONG_PROMPT, max_tokens=40, stop_token_ids=NEVER)
        lab.running.until(lambda: lab.told("prefix_hit_share", 0.9))
    finally:
        lab.running.close()


def test_a_late_joiner_catches_up_and_equals_an_updated_engine_then_its_loss_is_an_error(tied, tmp_path):
    lab = Lab(CONFIG, tmp_path, tied=True, policy_version=1)
    try:
        actor = lab.running.actor()
        actor.ask("early", PROMPT, max_tokens=8, temperature=0.0, stop_token_ids=NEVER)
        lab.running.until(lambda: lab.gauge("held_requests") == 1)
        lab.update()
        lab.running.until(lambda: actor.answers["early"].finish_reason != "")
        early = actor.answers["early"]
        assert set(early.versions) == {1}
        assert lab.policies.largest_error(PROMPT, early) < TOLERANCE
        actor.ask("lost", PROMPT, max_tokens=1000, stop_token_ids=NEVER)
        lab.running.until(lambda: len(actor.answers["lost"].ids) > 0)
        os.kill(engine_process(lab.running.process.pid), signal.SIGKILL)
        deadline = time.monotonic() + 240.0
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


def test_an_updated_engine_equals_a_fresh_one_and_a_killed_generator_leaves_no_engine(tied, tmp_path):
    version = tied.update()
    fresh = Running(CONFIG, save(tied.policies[version], tmp_path / "model"))
    try:
        settings = {"max_tokens": 60, "temperature": 0.0, "stop_token_ids": NEVER}
        expected = fresh.ask(fresh.actor(), "fresh", LONG_PROMPT, **settings)
        answer = tied.running.ask(tied.running.actor("updated"), "updated", LONG_PROMPT, **settings)
        assert answer.ids == expected.ids
        assert answer.logps == expected.logps
        engine = engine_process(fresh.process.pid)
        family = [engine, *children(engine)]
        fresh.process.kill()
        fresh.process.join()
        deadline = time.monotonic() + 240.0
        while not all(map(gone, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in family if not gone(pid)] == []
    finally:
        fresh.close()
