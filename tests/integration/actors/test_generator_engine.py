"""Test the generator process with a real vLLM engine on the CPU, over real sockets.

`engine_checks` has what a GPU must do, too: `tests/gpu/test_engine_on_gpu.py` calls the same checks.
"""

import pytest
import torch

from actors.config import GeneratorConfig
from tests.integration.actors.engine_checks import (
    BAD_WEIGHTS,
    FLOAT32,
    LONG_PROMPT,
    NEVER,
    PROMPT,
    Lab,
    check_aborted,
    check_fresh_engine_and_killed_generator,
    check_kept,
    check_late_joiner_and_lost_engine,
    check_refused,
    check_sleep,
    check_spans,
    check_updated,
)
from tests.integration.actors.stopping import check_stop_string
from tests.integration.learner.tiny_qwen3 import EOS, VOCAB

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLERANCE = FLOAT32.tolerance
CONFIG = GeneratorConfig(kv_cache_mb=64)


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
    check_spans(tied)


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
    # Tied weights with recomputed KV, untied weights with kept KV.
    check_updated(request.getfixturevalue(lab))


def test_with_kept_kv_later_tokens_are_computed_on_what_the_earlier_version_cached(kept):
    check_kept(kept)


@BAD_WEIGHTS
def test_bad_weights_are_refused_while_sampling_goes_on_and_good_ones_follow(tied, flaws, damage):
    check_refused(tied, flaws, damage)


def test_a_lower_version_is_refused(tied):
    manifest, first = tied.publish()
    version = tied.update()
    refused = tied.gauge("updates_refused_total")
    tied.running.broker.announce(manifest, version=first)
    tied.running.until(lambda: tied.gauge("updates_refused_total") == refused + 1)
    assert tied.running.broker.beat.policy_version == version


def test_an_aborted_request_returns_what_it_has(tied):
    check_aborted(tied)


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
    assert 0 < tied.gauge("update_pause_seconds") < 60
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


def test_a_late_joiner_catches_up_and_equals_an_updated_engine_then_its_loss_is_an_error(tmp_path):
    check_late_joiner_and_lost_engine(CONFIG, tmp_path)


def test_an_engine_that_sleeps_keeps_requests_waiting_and_wakes_unchanged(tmp_path):
    check_sleep(CONFIG, tmp_path)


def test_an_updated_engine_equals_a_fresh_one_and_a_killed_generator_leaves_no_engine(tied, tmp_path):
    check_fresh_engine_and_killed_generator(tied, tmp_path)
