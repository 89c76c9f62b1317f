"""Kill a process while it publishes: generators see the version before, or the new one whole, or nothing."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from actors.generator.weights.staging import Announced, Stage
from learner.publisher import Publisher
from learner.run_files import read_published, weights_folder
from learner.weight_copy import OutgoingWeights
from protocol.errors import WeightsError
from protocol.weights.files import NewVersion

SHAPES = {"a": ("F32", (1000,))}
STAGES = ("copied", "half a manifest", "renamed")


def weights(value):
    return OutgoingWeights(SHAPES, [("a", torch.full((1000,), float(value)))])


def publish_until_killed(run_dir, stage, pipe):
    """Publish version 1, begin with version 2, and stand still in the middle of it."""

    def stand(*arguments, **named):
        pipe.send("standing")
        threading.Event().wait(60.0)

    def half(path, content):
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        stand()

    publisher = Publisher("run", run_dir, epoch=1, keep=3)
    publisher.publish(1, weights(1), announce=pipe.send)
    publisher.settle()
    match stage:
        case "copied":
            NewVersion.finish = stand
        case "half a manifest":
            Path.write_bytes = half
    publisher.publish(2, weights(2), announce=stand)
    publisher.settle()


@pytest.mark.parametrize("stage", STAGES)
def test_nobody_sees_half_of_a_version_and_the_next_learner_goes_on(tmp_path, stage):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=publish_until_killed, args=(tmp_path, stage, theirs))
    process.start()
    theirs.close()
    assert ours.poll(60.0)
    first = ours.recv()
    assert first.version == 1
    assert ours.poll(60.0)
    assert ours.recv() == "standing"
    os.kill(process.pid, signal.SIGKILL)
    process.join(30.0)
    with pytest.raises(EOFError):
        ours.recv()
    # The version before is whole, and the new one is there whole or not at all.
    folder = weights_folder(tmp_path)
    assert sorted(path.name for path in folder.glob("v*")) == ["v00000001"] + ["v00000002"] * (
        stage == "renamed"
    )
    stage_folder = Stage("killed", SHAPES, root=tmp_path)
    assert stage_folder.stage(Announced(1, 1, first.manifest), "run")[0].root == first.root
    if stage != "renamed":
        with pytest.raises(WeightsError):
            stage_folder.stage(Announced(1, 2, first.manifest.replace("v00000001", "v00000002")), "run")
    # The number is noted before the version is finished, so the next learner takes a higher one, in an empty folder.
    assert read_published(tmp_path).version == 2
    again, told = Publisher("run", tmp_path, epoch=2, keep=3), []
    try:
        assert list(again.folder.iterdir()) == []
        again.publish(again.published.version + 1, weights(3), announce=told.append)
        again.settle()
        manifest, data = stage_folder.stage(Announced(2, told[0].version, told[0].manifest), "run")
        assert data.read_bytes().endswith(torch.full((1000,), 3.0).numpy().tobytes())
        assert manifest.version == 3
    finally:
        again.close()
        stage_folder.close()
