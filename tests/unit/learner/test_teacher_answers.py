"""Test what is taken of a teacher's answer."""

import pytest

from learner.update.teacher import TeacherFailed, logps_in


@pytest.mark.parametrize("value", ["-Infinity", "Infinity", "NaN", "-1e999", "0.5", "null"])
def test_a_log_probability_that_is_no_finite_number_up_to_zero_is_refused(value):
    answer = '{"choices": [{"logprobs": {"token_logprobs": [null, -0.5, ' + value + "]}}]}"
    with pytest.raises(TeacherFailed, match="no log-probability"):
        logps_in(answer.encode(), 3, "teacher")
