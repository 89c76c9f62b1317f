"""What an engine publishes, for tests to compare."""

import torch


def weights_of(engine):
    """Return the weights that an engine publishes, as copies by their names."""
    shapes, tensors = engine.weights()
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    result = {}
    for name, data in tensors:
        dtype, shape = shapes[name]
        result[name] = torch.frombuffer(bytearray(data), dtype=dtypes[dtype]).reshape(shape).clone()
    assert list(result) == list(shapes)
    return result


def assert_weights_close(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
