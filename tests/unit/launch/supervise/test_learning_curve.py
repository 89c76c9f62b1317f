"""Test that the picture of a run has what was measured: nothing, steps, and every evaluation set by its name."""

from launch.supervise import summary
from launch.supervise.summary import draw_curve

BEFORE = {"step": 0, "accuracy": 0.25, "return_mean": 0.5, "answered": 8, "tasks": 8}


def test_a_curve_without_points_has_no_legend(tmp_path):
    draw_curve([], [], tmp_path / "curve.png", title="run")
    assert (tmp_path / "curve.png").stat().st_size


def test_every_set_has_a_name_a_colour_and_a_marker(tmp_path, monkeypatch):
    drawn, held_out = [], summary._held_out
    monkeypatch.setattr(summary, "_held_out", lambda *parts: drawn.append(held_out(*parts)) or drawn[-1])
    sets = [BEFORE, BEFORE | {"set": "hard"}, BEFORE | {"set": "lost", "accuracy": None, "return_mean": None}]
    draw_curve([], sets, tmp_path / "curve.png", title="run")
    assert drawn == [
        [(0.25, "held-out solved, greedy", "black")],
        [(0.25, "hard: solved", "tab:purple")],
        [],
    ]
