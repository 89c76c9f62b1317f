"""Weights leave a GPU beside its work, and reach another place on it whole."""

from pathlib import Path

import pytest
import torch

from actors.generator.weights.staging import tensor_table
from actors.generator.weights.tensors import DeviceReader, file_bytes, free_bytes
from learner.publisher import Publisher
from learner.weight_copy import CopyStream, OutgoingWeights, register
from protocol.weights.format import DATA, read_manifest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SHAPES = {f"t{i}": ("BF16", (1024, 1024 + i)) for i in range(16)}


def test_a_version_has_the_weights_before_the_step_and_comes_back_whole(tmp_path, caplog):
    device = torch.device("cuda", 0)
    tensors = {name: torch.randn(shape, device=device).bfloat16() for name, (_, shape) in SHAPES.items()}
    before = {name: tensor.cpu() for name, tensor in tensors.items()}
    stream, told = CopyStream(device), []
    publisher = Publisher("run", tmp_path, epoch=1, keep=2, register=register)
    try:
        for version in (1, 2):
            publisher.publish(version, OutgoingWeights(SHAPES, tensors.items(), stream), announce=told.append)
            # The optimizer step: it is queued at once, and the device makes it after the copy.
            stream.hold()
            for tensor in tensors.values():
                tensor.mul_(2.0)
            publisher.settle()
            publisher.await_tidied()
        assert "CUDA cannot register" not in caplog.text
        for message, factor in zip(told, (1.0, 2.0), strict=True):
            manifest = read_manifest(Path(message.manifest))
            file = Path(message.manifest).with_name(DATA)
            data = file_bytes(str(file))
            reader = DeviceReader(device, 2**20)
            for name, tensor in reader.tensors(data, tensor_table(manifest), free_bytes(device)):
                assert tensor.device == device
                assert torch.equal(tensor.cpu(), before[name] * factor), name
    finally:
        publisher.close()


def test_without_registration_the_copy_is_the_same(tmp_path):
    device, told = torch.device("cuda", 0), []
    tensors = {name: torch.randn(shape, device=device).bfloat16() for name, (_, shape) in SHAPES.items()}
    publisher = Publisher("run", tmp_path, epoch=1, keep=1)
    try:
        publisher.publish(
            1, OutgoingWeights(SHAPES, tensors.items(), CopyStream(device)), announce=told.append
        )
        publisher.settle()
        content = Path(told[0].manifest).with_name(DATA).read_bytes()
    finally:
        publisher.close()
    assert content.endswith(b"".join(t.view(torch.uint8).cpu().numpy().tobytes() for t in tensors.values()))
