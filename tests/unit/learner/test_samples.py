"""Test what the learner keeps of what the model wrote: the choice, the texts, the file, and going back."""

import html
import json
import os

import numpy as np
import pytest
from msgspec import structs

from launch.model import make_tokenizer, save_tokenizer
from learner import sample_log
from learner.run import TrainingRun
from learner.sample_log import (
    FAILED,
    FIRST,
    PART_TOKENS,
    PARTS,
    SampleLog,
    make_sample,
    of_batch,
    of_evaluation,
    of_failed,
    of_uniform,
    open_tokenizer,
    parts_of,
)
from learner.samples import (
    MAX_LINE_BYTES,
    OLDER_SAMPLES_FILE,
    SAMPLES_FILE,
    Sample,
    SamplePart,
    escaped,
    facts,
    markdown_table,
    newest_samples,
    read_samples,
)
from learner.settings.learner import LearnerConfig
from learner.trainer import Trainer
from learner.update.report import mean_advantages
from protocol.messages.episodes import Failure, Reward
from tests.trajectories import batch_of, make_trajectory

RNG = np.random.default_rng(0)
ESCAPE = "\x1b[2J"


def letters(ids):
    return "".join(chr(97 + i % 26) for i in ids)


def batch(*rewards, **changes):
    return [make_trajectory(f"1g0.{i}.0", reward=reward, **changes) for i, reward in enumerate(rewards)]


def failed(name, message):
    return make_trajectory(name, status="failed", failure=Failure(kind="KeyError", message=message))


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def samples(tmp_path):
    clock = Clock()
    log = SampleLog(tmp_path, letters, clock=clock)
    log.clock = clock
    clock.now = 1000.0
    return log


# --- the choice ---


def test_of_a_batch_the_best_the_worst_and_two_others_are_kept():
    kept = of_batch(batch(0.5, 1.0, 0.0, 0.25, 0.75, 0.3), RNG)
    assert kept[:2] == [("best", 1), ("worst", 2)]
    assert [why for why, _ in kept[2:]] == ["random"] * 2
    assert len({place for _, place in kept}) == 4


def test_a_batch_of_equal_returns_shows_two_of_them_and_a_single_one_once():
    assert {place for why, place in of_batch(batch(1.0, 1.0), RNG) if why != "random"} == {0, 1}
    assert of_batch(batch(1.0), RNG) == [("best", 0)]


def test_a_greedy_baseline_is_not_a_sample_of_the_batch():
    baseline = make_trajectory("1g0.9.0", reward=9.0, temperature=0.0)
    assert of_batch([baseline, *batch(0.5)], RNG) == [("best", 1)]


def test_the_first_held_out_tasks_are_kept_at_every_evaluation():
    episodes = [*batch(0.5, 0.5, 0.5, 0.1, 0.9, 0.4, purpose="eval"), None]
    kept = of_evaluation(episodes)
    assert kept == [*[("first", i) for i in range(FIRST)], ("best", 4), ("worst", 3)]


def test_failed_episodes_are_kept_with_different_reasons():
    episodes = [failed("a", "'x'"), failed("b", "'x'"), failed("c", "'y'"), failed("d", "'z'"), None]
    assert of_failed(episodes) == [("failed", 0), ("failed", 2)]
    assert FAILED == 2


def test_of_groups_with_equal_returns_the_newest_has_a_sample():
    groups = [(0.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.5,)]
    arrived = [
        make_trajectory(f"1g{g}.{i}.0", group=f"1g{g}", reward=reward, group_size=2)
        for g, rewards in enumerate(groups)
        for i, reward in enumerate(rewards)
    ]
    assert of_uniform(arrived, []) == [("uniform", 4)]
    assert of_uniform(arrived, arrived[4:6]) == [("uniform", 2)]
    assert of_uniform(arrived[:2], []) == []
    assert of_uniform(arrived[4:5], []) == [], "the other member may still come"


def test_the_first_group_that_is_whole_is_kept_whatever_its_returns(samples, tmp_path):
    def member(i, group, **changes):
        return make_trajectory(f"{group}.{i}.0", group=group, group_size=2, **changes)

    begun = [member(0, "1g0", reward=0.0)]
    assert not samples.first_group(0, begun)
    assert list(read_samples(tmp_path)) == []
    equal = [*begun, member(0, "1g1", reward=0.0), member(1, "1g1", reward=0.0)]
    assert samples.first_group(0, equal)
    kept = [(s.step, s.split, s.chosen, s.group) for s in read_samples(tmp_path)]
    assert kept == [(0, "train", "first", "1g1")] * 2
    # A learner that begins anew at step 0 writes them again.
    samples.rewind(0, ())
    assert list(read_samples(tmp_path)) == []
    fails = {"status": "failed", "failure": Failure(kind="KeyError", message="'x'")}
    assert samples.first_group(0, [member(0, "1g2", **fails), member(1, "1g2", **fails)])
    assert [(s.chosen, s.failure) for s in read_samples(tmp_path)] == [("failed", "KeyError: 'x'")]


# --- the texts ---


def test_an_episode_of_two_turns_is_prompt_answer_observation_answer():
    t = make_trajectory("t", prompt=3, actions=7, observation=(5, 8))
    parts = parts_of(t, letters)
    assert [(part.kind, part.tokens) for part in parts] == [
        ("prompt", 3), ("answer", 2), ("observation", 3), ("answer", 2),
    ]  # fmt: skip
    assert "".join(part.text for part in parts) == letters(t.token_ids.tolist())


def test_a_long_answer_is_decoded_at_its_ends_only():
    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return letters(ids)

    t = make_trajectory("t", actions=50 * PART_TOKENS)
    answer = parts_of(t, decode)[1]
    assert answer.tokens == 50 * PART_TOKENS
    assert f"[{49 * PART_TOKENS} tokens left out]" in answer.text
    assert sum(decoded) <= PART_TOKENS + 4


def test_a_long_episode_shows_its_beginning_and_its_end():
    total = 4 * PARTS
    mask = np.arange(total) % 2 == 1
    t = make_trajectory(
        "t", prompt=1, actions=total - 1, action_mask=mask, policy_version=np.where(mask, 0, -1)
    )
    parts = parts_of(t, letters)
    assert len(parts) == PARTS + 1
    gap = parts[PARTS // 2]
    assert (gap.kind, gap.text, gap.tokens) == (
        "left_out",
        f"[{total - PARTS} parts left out]",
        total - PARTS,
    )
    assert sum(part.tokens for part in parts) == total


def test_a_line_is_bounded_whatever_the_tokens_are():
    t = make_trajectory("t", prompt=2_000, actions=3_000, observation=(2_500, 3_000))
    sample = make_sample(t, lambda ids: "\U0001f600" * 40 * len(ids), chosen="best", step=1, version=1)
    line = sample_log.encode_line(sample)
    assert len(line) <= MAX_LINE_BYTES
    assert len(sample.parts) == 4
    assert all("left out" in part.text for part in sample.parts)


def test_a_sample_has_the_numbers_of_its_trajectory():
    t = make_trajectory("1g7.2.0", group="1g7", version=[3, 4, 4, 5, 5], correct=True, stop_reason="stop")
    t.rewards[:] = [Reward("exact", 1, 0.5), Reward("format", 1, 0.25), Reward("exact", 3, 0.25)]
    sample = make_sample(t, letters, chosen="best", step=8, version=7, advantage=0.5)
    assert sample.rewards == {"exact": 0.75, "format": 0.25}
    assert (sample.return_, sample.advantage, sample.correct) == (1.0, 0.5, True)
    assert (sample.version_min, sample.version_max, sample.lag) == (3, 5, 4)
    assert (sample.task, sample.group, sample.end) == ("1g7.2", "1g7", "finished: stop")


def test_the_tokenizer_of_a_model_folder_decodes_with_special_tokens(tmp_path):
    tokenizer = make_tokenizer(["Spell it: cat", "Spell it: cow"])
    save_tokenizer(tokenizer, tmp_path, max_length=64)
    decode = open_tokenizer(str(tmp_path))
    ids = tokenizer.encode("<bos><user>Spell it: cat<assistant>tac<eos>", add_special_tokens=False).ids
    assert decode(ids) == "<bos><user>Spell it: cat<assistant>tac<eos>"


def test_without_a_tokenizer_no_samples_are_written_and_the_log_says_why(tmp_path, caplog):
    assert open_tokenizer(str(tmp_path)) is None
    assert "no samples are written" in caplog.text
    log = SampleLog(tmp_path, None)
    assert log.step(1, 0, batch(1.0), []) == []
    assert log.evaluation(1, 0, "before", batch(1.0)) == []
    log.untrained(0, 0, batch(1.0))
    assert not (tmp_path / SAMPLES_FILE).exists()


def test_the_advantage_of_a_trajectory_is_the_mean_over_its_tokens_with_gradient():
    # The first is as old as the bound allows, the second is too old in its first two tokens, the third throughout.
    first = make_trajectory("a", actions=3, version=4)
    second = make_trajectory("b", actions=4, version=[1, 1, 5, 5])
    stale = make_trajectory("c", actions=2, version=1)
    batch = batch_of([first, second, stale], np.array([0.5, -1.0, 2.0]), current_version=5, max_policy_lag=1)
    end = int(batch.lengths[:2].sum())
    batch.columns["advantage"][end - 4 : end] = [9.0, 9.0, -2.0, -4.0]
    np.testing.assert_allclose(mean_advantages(batch), [0.5, -3.0, np.nan])


# --- the file ---


def test_a_step_writes_what_it_trained_and_what_failed(samples, tmp_path):
    samples.step(3, 2, batch(0.0, 1.0), [failed("1g9.0.0", "'x'")], np.array([-0.5, np.nan]))
    read = list(read_samples(tmp_path))
    assert [(s.chosen, s.advantage, s.failed) for s in read] == [
        ("best", None, False), ("worst", -0.5, False), ("failed", None, True),
    ]  # fmt: skip
    assert (read[0].step, read[0].policy_version, read[2].failure) == (3, 2, "KeyError: 'x'")
    assert newest_samples(tmp_path) == read


def test_what_cannot_be_trained_is_written_too(samples, tmp_path):
    samples.untrained(0, 0, [*batch(0.0, 0.0), failed("1g9.0.0", "'x'")])
    assert [s.chosen for s in read_samples(tmp_path)] == ["untrained", "untrained", "failed"]


def test_a_line_that_a_crash_cut_is_left_out_and_the_next_start_repairs_it(samples, tmp_path):
    samples.step(1, 0, batch(1.0), [])
    with open(tmp_path / SAMPLES_FILE, "ab") as file:
        file.write(b'{"step": 2, "policy_ver')
    assert [s.step for s in read_samples(tmp_path)] == [1]
    samples.rewind(1, ())
    samples.step(2, 1, batch(1.0), [])
    assert [s.step for s in read_samples(tmp_path)] == [1, 2]
    assert all(json.loads(line) for line in (tmp_path / SAMPLES_FILE).read_text().splitlines())


def test_going_back_deletes_what_is_done_again_and_nothing_else(samples, tmp_path):
    samples.evaluation(0, 0, "before", batch(1.0, purpose="eval"))
    for step in (1, 2, 3):
        samples.step(step, step - 1, batch(1.0), [])
    samples.evaluation(2, 2, "step 2", batch(1.0, purpose="eval"))
    samples.untrained(2, 2, batch(0.0))

    def rows():
        return [(s.step, s.evaluation, s.chosen) for s in read_samples(tmp_path)]

    samples.rewind(2, {"before", "step 2"})
    assert rows() == [(0, "before", "first"), (1, "", "best"), (2, "", "best"), (2, "step 2", "first")]
    # The checkpoint of step 2 does not know the evaluation that followed it, which is done again.
    samples.rewind(2, {"before"})
    assert rows() == [(0, "before", "first"), (1, "", "best"), (2, "", "best")]
    samples.rewind(0, ())
    assert rows() == []


def test_the_two_files_are_bounded(samples, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_log, "MAX_FILE_BYTES", 4_000)
    for step in range(1, 60):
        samples.step(step, 0, batch(1.0), [])
    sizes = [(tmp_path / name).stat().st_size for name in (OLDER_SAMPLES_FILE, SAMPLES_FILE)]
    assert max(sizes) <= 4_000
    steps = [s.step for s in read_samples(tmp_path)]
    assert steps == list(range(steps[0], 60))
    assert 1 < steps[0] < 55
    samples.rewind(steps[1], ())
    assert [s.step for s in read_samples(tmp_path)] == steps[:2]


def test_samples_that_take_too_long_leave_steps_out(samples, tmp_path):
    def slow(ids):
        samples.clock.now += 6.0
        return letters(ids)

    samples._decode = slow
    for step in (1, 2, 3):
        samples.step(step, 0, batch(1.0), [])
    # 12 s of 1,000 s are more than one hundredth, until the run is 1,200 s old.
    assert [s.step for s in read_samples(tmp_path)] == [1]
    samples.clock.now += 250.0
    samples.step(4, 0, batch(1.0), [])
    assert [s.step for s in read_samples(tmp_path)] == [1, 4]


def test_a_disk_that_is_full_costs_samples_and_no_run(samples, tmp_path, caplog):
    (tmp_path / SAMPLES_FILE).mkdir()
    samples.step(1, 0, batch(1.0), [])
    samples.step(2, 1, batch(1.0), [])
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / SAMPLES_FILE).rmdir()
    samples.step(3, 2, batch(1.0), [])
    samples.step(4, 3, batch(1.0), [])
    assert [s.step for s in read_samples(tmp_path)] == [3, 4]


def test_a_reader_may_come_at_any_moment(samples, tmp_path):
    samples.step(1, 0, batch(0.0, 1.0), [])
    whole = (tmp_path / SAMPLES_FILE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / SAMPLES_FILE).write_bytes(whole[:length])
        assert len(list(read_samples(tmp_path))) == whole[: length + 1].count(b"}\n")
    os.unlink(tmp_path / SAMPLES_FILE)
    assert list(read_samples(tmp_path)) == newest_samples(tmp_path) == []


# --- what is shown ---


def test_no_control_character_of_a_model_reaches_the_file_or_a_table(samples, tmp_path):
    samples._decode = lambda ids: f"{ESCAPE}|`\n\u202e\x9b"
    (sample, *_) = samples.step(1, 0, batch(1.0), [])
    line = (tmp_path / SAMPLES_FILE).read_bytes()
    assert line.isascii()
    assert not set(line.rstrip(b"\n")) & set(range(32))
    assert escaped(sample.parts[0].text) == r"\x1b[2J|`\n\u202e\x9b"
    table = markdown_table([sample])
    assert len(table.splitlines()) == 3
    assert table.splitlines()[2].count("|") == table.splitlines()[0].count("|")
    assert ESCAPE not in table


@pytest.mark.filterwarnings("ignore:html5lib")
def test_tensorboard_shows_special_tokens_as_they_are():
    from tensorboard.plugin_util import markdown_to_safe_html

    text = "<|im_start|>user\\n*a* _b_ | [c](http://d) &amp; \\| `e`"
    row = Sample(step=1, policy_version=0, split="train", env="e", task="t", group="g", parts=[
        SamplePart("prompt", text, 3)
    ])  # fmt: skip
    shown = html.unescape(markdown_to_safe_html(markdown_table([row])))
    assert f"<td><code>{text.replace('`', chr(39))}</code></td>" in shown
    assert shown.count("<td>") == 8


def test_returns_that_differ_a_little_are_shown_as_different():
    row = Sample(step=1, policy_version=0, split="train", env="e", task="t", group="g")
    texts = [facts(structs.replace(row, return_=x, rewards={"score": x})) for x in (1.0, 1.0001, 0.1 + 0.2)]
    assert [text.rstrip(", ") for text in texts] == [
        "return 1 (score 1)", "return 1.0001 (score 1.0001)", "return 0.3 (score 0.3)",
    ]  # fmt: skip


def test_a_line_of_a_later_version_is_read():
    line = b'{"step":1,"policy_version":0,"split":"train","env":"e","task":"t","group":"g","news":7}'
    sample = sample_log.decode_line(line)
    assert isinstance(sample, Sample)
    assert sample.return_ == 0.0


def test_the_learner_rewinds_with_the_evaluations_of_its_checkpoint(samples, tmp_path):
    said = []

    class Report:
        def rewind(self, step):
            said.append(step)

    samples.evaluation(0, 0, "before", batch(1.0, purpose="eval"))
    trainer = Trainer(LearnerConfig(), tmp_path, None, None, None, Report(), samples=samples)
    TrainingRun(trainer, None).checkpoints.rewind()
    assert said == [0]
    assert list(read_samples(tmp_path)) == []


def test_a_sample_says_when_it_was_written_and_an_older_one_does_not(tmp_path):
    log = SampleLog(tmp_path, letters, wall_clock=lambda: 1_800_000_000.0004)
    log.step(1, 0, batch(0.0, 1.0), [])
    log.evaluation(1, 0, "start", batch(1.0))
    assert {sample.time for sample in read_samples(tmp_path)} == {1_800_000_000.0}
    path = tmp_path / SAMPLES_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in x.items() if k != "time"}) + "\n" for x in lines))
    assert {sample.time for sample in read_samples(tmp_path)} == {None}
