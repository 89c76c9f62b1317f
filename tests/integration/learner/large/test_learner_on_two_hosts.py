"""A learner on two hosts, each with its own torchrun, trains like one process. Both hosts are this machine."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launch.processes import Ranks, free_port
from learner.update.engine import TrainingEngine
from tests.integration.learner.published import assert_weights_close, weights_of
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.integration.learner.two_ranks import batches, settings

PROGRAM = Path(__file__).with_name("two_hosts.py")
TOKENS = 40
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save(tiny_model(tied=False, seed=4), tmp_path_factory.mktemp("model")))


def run_on_two_hosts(model, *hosts):
    """Run the program on two hosts, each with its folder and settings. Return exit codes and what they said."""
    rendezvous = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [*Ranks(1, 2, node, rendezvous).torchrun(), "--", str(PROGRAM), model, *map(str, host)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, host in enumerate(hosts)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait(TIMEOUT_S)
    return [process.returncode for process in started], said


def test_two_hosts_equal_one_process(model, tmp_path):
    codes, said = run_on_two_hosts(model, (tmp_path, TOKENS), (tmp_path, TOKENS))
    assert codes == [0, 0], "\n".join(said)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["ranks"], result["client"], result["resumed"]) == (2, {"cursor": 3}, True)
    assert [path.name for path in tmp_path.glob(".learner-*")] == []
    alone = settings(3, "float32", 1)
    single = TrainingEngine(alone, model=model, total_steps=alone.steps, seed=5)
    try:
        first, second, _ = batches()
        expected = single.update(first, current_version=0).metrics
        assert result["metrics"]["learner/loss"] == pytest.approx(expected["learner/loss"], abs=1e-5)
        single.update(second, current_version=0)
        assert_weights_close(load_file(tmp_path / "trained.safetensors"), weights_of(single), atol=1e-5)
    finally:
        single.close()


@pytest.mark.parametrize(
    ("tokens", "folder", "words"),
    [
        (TOKENS + 1, "", "differ from those of rank 0"),
        (TOKENS, "other", "does not see the run folder"),
    ],
)
def test_hosts_that_do_not_fit_end_on_both_sides_with_the_cure(model, tmp_path, tokens, folder, words):
    other = tmp_path / folder
    other.mkdir(exist_ok=True)
    codes, said = run_on_two_hosts(model, (tmp_path, TOKENS), (other, tokens))
    assert all(codes)
    for words_of_host in said:
        assert words in words_of_host
        assert "(rank 1)" in words_of_host
