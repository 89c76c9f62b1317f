"""Test which models are written before the end of a run, and which ones stay."""

import pytest

from learner.run_files import best_model, best_of, remove_others, step_model, write_model


def evaluation(step, accuracy, *, name="", return_mean=0.0):
    return {"set": name, "step": step, "accuracy": accuracy, "return_mean": return_mean}


def save(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")


def test_the_evaluation_before_the_first_step_is_never_the_best():
    assert best_of([evaluation(0, 0.9)], "") is None
    assert best_of([evaluation(0, 0.9), evaluation(5, 0.1)], "")["step"] == 5


def test_evaluations_without_a_result_and_of_other_sets_do_not_count():
    seen = [evaluation(5, 0.2), evaluation(10, None, return_mean=None), evaluation(10, 0.8, name="hard")]
    assert best_of(seen, "")["step"] == 5
    assert best_of(seen, "hard")["step"] == 10


def test_the_return_decides_where_nothing_says_what_is_right():
    seen = [evaluation(5, None, return_mean=1.0), evaluation(10, None, return_mean=3.0)]
    assert best_of(seen, "")["step"] == 10


def test_a_model_whose_writing_ends_half_way_is_not_there(tmp_path):
    def broken(folder):
        save(folder)
        raise OSError("disk full")

    folder = step_model(tmp_path, 5)
    with pytest.raises(OSError):
        write_model(folder, broken)
    assert not folder.exists()
    write_model(folder, save)
    write_model(folder, save)
    assert [path.name for path in folder.parent.iterdir()] == ["step-000005"]


def test_only_the_best_and_those_of_steps_that_are_done_stay(tmp_path):
    for folder in (
        *(best_model(tmp_path, 5), best_model(tmp_path, 10)),
        *(step_model(tmp_path, 10), step_model(tmp_path, 20)),
    ):
        write_model(folder, save)
    save(step_model(tmp_path, 10).with_name("step-000010.partial"))
    remove_others(tmp_path, best=5, newest=10)
    save(tmp_path / "models" / "mine")
    save(tmp_path / "models" / "best-step-5-copy")
    remove_others(tmp_path, best=5, newest=10)
    left = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert left == ["best-step-000005", "best-step-5-copy", "mine", "step-000010"]
    remove_others(tmp_path, best=None, newest=0)
    left = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert left == ["best-step-5-copy", "mine"], "what others put there stays"
