"""The picture of a run without evaluations and without steps is drawn without a warning."""

from launch.supervise.learning_curve import draw_curve


def test_a_curve_without_points_has_no_legend(tmp_path):
    draw_curve([], [], tmp_path / "curve.png", title="run")
    assert (tmp_path / "curve.png").stat().st_size
