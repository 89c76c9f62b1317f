"""Test that a version which is an adapter is taken for layers of the model in service, and for nothing else."""

import pytest

from protocol.errors import WeightsError
from protocol.weights.format import (
    ADAPTER_DOWN,
    ADAPTER_UP,
    Manifest,
    adapter_shapes,
    layout,
    root_hash,
    verify_adapter,
)

MODEL = {"a.weight": ("F32", (6, 4)), "b.weight": ("F32", (8, 6)), "norm.weight": ("F32", (6,))}


def manifest(shapes):
    header, tensors = layout(shapes)
    nbytes = len(header) + sum(t.nbytes for t in tensors)
    return Manifest(
        run="r", epoch=0, version=3, nbytes=nbytes, tensors=tensors, root=root_hash(tensors, 1, b""), chunk_bytes=1,
        chunks=b"",
    )  # fmt: skip


@pytest.mark.parametrize("layers", [["a"], ["a", "b"]])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_an_adapter_of_some_layers_is_taken_whatever_its_float_type(layers, dtype):
    verify_adapter(manifest(adapter_shapes(layers, MODEL, 2, dtype)), MODEL, 2)


def changed(name, entry):
    shapes = adapter_shapes(["a", "b"], MODEL, 2, "F32")
    if entry is None:
        del shapes[name]
    else:
        shapes[name] = entry
    return shapes


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (MODEL, "version 3 has whole weights, but this generator takes adapters"),
        (changed("a" + ADAPTER_UP, None), "tensor a.lora_B.weight is missing"),
        (
            changed("a" + ADAPTER_UP, ("F32", (5, 2))),
            r"a.lora_B.weight is F32 \[5, 2\], the model .* \(6, 2\)",
        ),
        (changed("a" + ADAPTER_DOWN, ("F32", (2, 5))), "a.lora_A.weight is F32"),
        (changed("a" + ADAPTER_DOWN, ("F32", (3, 4))), r"adapters of rank \[2, 3\]"),
        (changed("a" + ADAPTER_DOWN, ("BF16", (2, 4))), r"type \['BF16', 'F32'\]"),
        (
            changed("c" + ADAPTER_DOWN, ("F32", (2, 4))),
            "an adapter of c, of which the model in service has no matrix",
        ),
        (changed("norm" + ADAPTER_DOWN, ("F32", (2, 4))), "an adapter of norm, of which"),
        (changed("a.weight", ("F32", (6, 4))), "tensor a.weight is not part of the model in service"),
        (adapter_shapes(["a"], MODEL, 3, "F32"), "one rank of at most 2"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_refused(shapes, words):
    with pytest.raises(WeightsError, match=words):
        verify_adapter(manifest(shapes), MODEL, 2)
