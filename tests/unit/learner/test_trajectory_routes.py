"""Rows of experts on their way from segments to a trajectory, and what becomes of them when it is changed."""

import json

import numpy as np
import pytest

from learner.errors import BrokenTrajectory, RoutesUnknown
from learner.families.branching import behind_prompt
from learner.intake.trajectories import OpenTrajectories, assemble, trajectories_of
from learner.metrics import Report
from learner.replay.file import decode_item, encode_item
from learner.settings.learner import LearnerConfig
from learner.trainer import Trainer, save_trajectories
from learner.trajectory import Counts, RouteLayers
from learner.update.report import UpdateReport
from protocol.arrays import SegmentArrays
from protocol.messages.episodes import Segment, Turn
from protocol.version_line import VersionLine
from tests.trajectories import batch_of, make_trajectory, with_routes


def segments(*rows, tokens=3, dtype=np.uint8):
    """Return segments of three tokens each, with these pairs (token, experts)."""
    found = []
    for index, pairs in enumerate(rows):
        offset = index * tokens
        action = int(index > 0)
        header = Segment(
            trajectory_id="t.0", task_id="t", group_id="g", group_size=1, index=index, offset=offset, tokens=tokens,
            action_tokens=tokens * action, status="finished" if index + 1 == len(rows) else "unfinished",
            turns=[Turn(index, offset, offset + tokens, bool(action))],
        )  # fmt: skip
        arrays = {
            "token_ids": np.arange(tokens, dtype=np.int32),
            "action_mask": np.full(tokens, action, np.uint8),
            "logp_behaviour": np.full(tokens, -1.0 * action, np.float32),
            "policy_version": np.full(tokens, action - 1, np.int32),
        }
        if pairs:
            arrays["routed_token"] = np.array([token for token, _ in pairs], np.int32)
            arrays["routed_experts"] = np.array([e for _, experts in pairs for e in experts], dtype)
        found.append(SegmentArrays(header, arrays))
    return found


def test_the_first_row_of_a_token_counts_and_tokens_may_have_none():
    t = assemble(segments([], [(0, [1, 2]), (4, [3, 0])], [(4, [9, 9]), (2, [5, 6])]))
    assert t.routed_token.tolist() == [0, 2, 4]
    assert t.routed_experts.tolist() == [1, 2, 5, 6, 3, 0]
    assert assemble(segments([], [(1, [300])], dtype=np.int16)).routed_experts.tolist() == [300]
    assert not len(assemble(segments([], [])).routed_token)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(0, [1, 2]), (1, [1])], r"numbers; all must have as many"),
        ([(6, [1, 2])], "of tokens 6 to 6, it has 6 tokens"),
        ([(-1, [1, 2])], "of tokens -1 to -1"),
        ([(0, [])], "numbers; all must have as many"),
    ],
)
def test_rows_that_fit_no_token_break_the_trajectory(rows, words):
    with pytest.raises(BrokenTrajectory, match=words):
        assemble(segments([], rows))


def test_segments_with_rows_of_other_widths_and_kinds_are_broken():
    with pytest.raises(BrokenTrajectory, match=r"\[1\.0, 2\.0\] numbers"):
        assemble(segments([(0, [1])], [(1, [1, 2])]))
    with pytest.raises(BrokenTrajectory, match="float32"):
        assemble(segments([], [(0, [1])], dtype=np.float32))
    with pytest.raises(BrokenTrajectory, match="from -1 of tokens"):
        assemble(segments([], [(0, [-1])], dtype=np.int16))


@pytest.mark.parametrize(
    ("row", "layers", "broken"),
    [
        ([1, 2, 3, 0], (0, 1), False),
        ([1, 2, 0, 0], (0, 1), True),
        # The second layer has no experts, so its numbers mean nothing.
        ([1, 2, 0, 0], (0,), False),
        # The row is of a model with other layers, which ends the run in the update.
        ([1, 1, 2, 2], (0, 2), False),
        ([1, 1, 1], (0,), False),
    ],
)
def test_a_token_that_went_through_an_expert_twice_breaks_the_trajectory(row, layers, broken):
    shape = RouteLayers(layers, 2)
    parts = segments([], [(0, [2, 1, 1, 2][: len(row)]), (4, row)])
    counts = Counts()
    assert assemble(parts).routed_experts.tolist()[-len(row) :] == row
    assert len(trajectories_of(parts, VersionLine(), counts, shape)) == (not broken)
    assert counts.trajectories == ({"rejected": 1} if broken else {})
    if broken:
        with pytest.raises(
            BrokenTrajectory, match=r"token 4 went through experts \[0, 0\] of layer 1, one of them twice"
        ):
            OpenTrajectories().extend(parts, shape)


def test_trajectories_of_two_models_do_not_form_a_batch():
    one, two = make_trajectory("a"), make_trajectory("b")
    with pytest.raises(RoutesUnknown, match="4 and 6 experts for a token"):
        batch_of([with_routes(one), with_routes(two, layers=3)])


def test_the_replay_table_keeps_them_and_another_prompt_moves_them():
    t = with_routes(make_trajectory("a", prompt=4, actions=5))
    again = decode_item(encode_item(t))
    assert again.routed_token.tolist() == t.routed_token.tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert (again.routed_experts.dtype, again.routed_experts.tolist()) == (
        np.uint8,
        t.routed_experts.tolist(),
    )
    moved = behind_prompt(t, np.zeros(6, np.int32))
    assert moved.routed_token.tolist() == [7, 8, 9]
    assert moved.routed_experts.tolist() == t.routed_experts.reshape(7, 4)[4:].reshape(-1).tolist()
    assert not len(behind_prompt(make_trajectory("b"), np.zeros(6, np.int32)).routed_token)


@pytest.mark.parametrize(("share", "told"), [(0.0, True), (0.49, True), (0.5, False), (1.0, False)])
def test_a_first_batch_without_experts_gives_one_warning(tmp_path, caplog, share, told):
    report = Report(tmp_path)
    trainer = Trainer(LearnerConfig(), tmp_path, None, None, None, report, step=1)
    # A step that trained nothing has no share.
    for metrics in ({}, {"learner/routes_known_share": share}, {"learner/routes_known_share": 0.1}):
        trainer.note_missing_routes(UpdateReport(applied=True, metrics=metrics))
    report.close()
    notes = [json.loads(line)["note"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(notes) == told
    assert [record.getMessage() for record in caplog.records] == notes
    if told:
        assert (
            f"only {share:.0%} of the input tokens of this batch have experts that a generator sent"
            in notes[0]
        )
        assert "give all of them this installation and this run file" in notes[0]


def test_trajectories_of_a_step_that_was_not_finite_are_saved_with_their_experts(tmp_path):
    with_rows, without = with_routes(make_trajectory("a")), make_trajectory("b")
    saved = np.load(save_trajectories(tmp_path, 3, [with_rows, without]))
    assert saved["0.routed_token"].tolist() == with_rows.routed_token.tolist()
    assert saved["0.routed_experts"].tolist() == with_rows.routed_experts.tolist()
    assert saved["1.token_ids"].tolist() == without.token_ids.tolist()
    assert not [name for name in saved.files if name.startswith("1.routed")]
