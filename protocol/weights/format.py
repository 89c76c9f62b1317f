"""Weights on disk or in shared memory: an ordinary safetensors file beside a manifest that proves it whole."""

import json
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from protocol.errors import WeightsError

MANIFEST = "manifest.msgpack"
DATA = "model.safetensors"
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_TENSORS = 65_536
MAX_BYTES = 2**44
"""Upper limit of the bytes of one version: 16 TiB."""
MAX_CHUNKS = 2**20
MAX_CHUNK_BYTES = 16 * 2**20
DIGEST_BYTES = 32
MAX_SAFETENSORS_HEADER_BYTES = 100 * 2**20
"""Limit that the reference reader of safetensors has, too."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAFETENSORS_DTYPES = dict(F64=8, F32=4, BF16=2, F16=2, I64=8, I32=4, I16=2, U8=1, BOOL=1)
"""Bytes of one element, by the dtype's name in a safetensors file."""
TORCH_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32",
    "I16": "int16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The same dtypes by their names in torch, which this folder does not import."""
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (see `SAFETENSORS_DTYPES`) and shape of each tensor, by name."""


TensorName = Annotated[str, Meta(max_length=1_024)]
Hex = Annotated[str, Meta(max_length=2 * DIGEST_BYTES)]
WholeNumber = Annotated[int, Meta(ge=0)]
Extent = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Digests = Annotated[bytes, Meta(max_length=MAX_CHUNKS * DIGEST_BYTES)]


class TensorSpec(Struct, frozen=True):
    """One tensor of a version: safetensors dtype name, shape, and absolute place in the data file."""

    name: TensorName
    dtype: TensorName
    shape: Annotated[list[Extent], Meta(max_length=16)]
    offset: Extent
    nbytes: Extent


class Base(Struct, frozen=True):
    """The version that a delta applies to, and to no other."""

    epoch: WholeNumber
    version: WholeNumber
    root: Hex


class Stamp(Struct, frozen=True):
    """Identity of the data file in its host's file system; it changes if the file is written or replaced.

    Only the learner's own user could hide a change, by setting the time back on purpose.
    """

    device: WholeNumber
    inode: WholeNumber
    mtime_ns: int


class Manifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Description of a version. The learner's host writes it; generators and servers of versions read it.

    ``root`` is the hash over all tensors' names, dtypes, shapes and sizes, and over ``chunks``. ``chunks``
    holds the BLAKE3 hashes of every ``chunk_bytes`` of the data file, concatenated. A transfer sends the file
    itself (encoding "full"), or a delta of ``delta_bytes`` that makes the file out of ``base`` ("xor-zstd").
    ``delta_chunks`` holds the hashes of the delta's chunks. ``host`` names the machine that wrote the
    version, and ``stamp`` identifies the complete data file there.
    """

    run: TensorName
    epoch: WholeNumber
    version: WholeNumber
    nbytes: Extent
    tensors: Annotated[list[TensorSpec], Meta(max_length=MAX_TENSORS)]
    root: Hex
    chunk_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]
    chunks: Digests
    encoding: Literal["full", "xor-zstd"] = "full"
    base: Base | None = None
    delta_bytes: Extent = 0
    delta_chunks: Digests = b""
    host: TensorName = ""
    stamp: Stamp | None = None

    @property
    def transfer_bytes(self) -> int:
        """Bytes that a transfer sends: of the data file or of the delta."""
        return self.nbytes if self.encoding == "full" else self.delta_bytes

    @property
    def as_base(self) -> Base:
        """This version as the base of a delta."""
        return Base(self.epoch, self.version, self.root)


def host_id() -> str:
    """Return the id of the running kernel. Containers of a machine share it, copies of a disk do not."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def layout(shapes: Shapes) -> tuple[bytes, list[TensorSpec]]:
    """Return the header of a safetensors file with these tensors, and the place of each tensor."""
    entries: dict[str, dict[str, object]] = {}
    sizes: dict[str, int] = {}
    position = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = SAFETENSORS_DTYPES[dtype]
        for extent in shape:
            nbytes *= extent
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        sizes[name] = nbytes
        position += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    specs, position = [], len(header)
    for name, (dtype, shape) in shapes.items():
        specs.append(TensorSpec(name, dtype, list(shape), position, sizes[name]))
        position += sizes[name]
    return header, specs


def root_hash(tensors: Iterable[TensorSpec], chunk_bytes: int, chunks: bytes) -> str:
    """Return the BLAKE3 hash over the tensors' descriptions, in order, and over the hashes of the chunks."""
    hashed = blake3()
    for t in tensors:
        hashed.update(json.dumps([t.name, t.dtype, t.shape, t.nbytes]).encode())
    hashed.update(json.dumps([chunk_bytes]).encode())
    hashed.update(chunks)
    return hashed.hexdigest()


def version_folder(root: Path, version: int) -> Path:
    """Return the folder of a version below ``root``.

    Example:
        >>> version_folder(Path("/dev/shm/run"), 17).name
        'v00000017'
    """
    return root / f"v{version:08d}"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a version.

    Raises:
        WeightsError: the manifest is unreadable or contradicts itself.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_MANIFEST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: {error}") from None
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Decode and check a manifest; ``where`` names the origin of the bytes in errors.

    Raises:
        WeightsError: it is too large, is no manifest, or contradicts itself.
    """
    if len(content) > MAX_MANIFEST_BYTES:
        raise WeightsError(f"{where}: more than {MAX_MANIFEST_BYTES} bytes; this is not a manifest")
    try:
        manifest = msgspec.msgpack.decode(content, type=Manifest)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise WeightsError(f"{where}: {error}") from None
    _check_places(manifest, where)
    _check_transfer(manifest, where)
    if root_hash(manifest.tensors, manifest.chunk_bytes, manifest.chunks) != manifest.root:
        raise WeightsError(f"{where}: root hash does not match what is listed; the manifest was altered")
    return manifest


def _check_places(manifest: Manifest, where: str) -> None:
    """Check that tensors lie where `layout` puts them: none twice, no overlap, no gap, nothing behind."""
    shapes = {t.name: (t.dtype, tuple(t.shape)) for t in manifest.tensors}
    if len(shapes) < len(manifest.tensors):
        raise WeightsError(f"{where}: a tensor is listed twice")
    for t in manifest.tensors:
        if t.dtype not in SAFETENSORS_DTYPES:
            raise WeightsError(
                f"{where}: {t.name} has dtype {t.dtype!r}; known: {sorted(SAFETENSORS_DTYPES)}"
            )
    header, places = layout(shapes)
    for t, place in zip(manifest.tensors, places, strict=True):
        if (t.offset, t.nbytes) != (place.offset, place.nbytes):
            raise WeightsError(
                f"{where}: {t.name} is said to have {t.nbytes} bytes at {t.offset}; by shapes and order it has "
                f"{place.nbytes} at {place.offset}"
            )
    end = len(header) + sum(place.nbytes for place in places)
    if manifest.nbytes != end:
        raise WeightsError(
            f"{where}: the file is said to have {manifest.nbytes} bytes, its tensors end at {end}"
        )


def _check_transfer(manifest: Manifest, where: str) -> None:
    if (manifest.encoding == "full") != (manifest.base is None):
        raise WeightsError(
            f"{where}: encoding {manifest.encoding} and base {manifest.base} exclude each other"
        )
    told = manifest.delta_bytes if manifest.encoding != "full" else 0
    for size, hashes in ((manifest.nbytes, manifest.chunks), (told, manifest.delta_chunks)):
        expected = -(-size // manifest.chunk_bytes) * DIGEST_BYTES
        if len(hashes) != expected:
            raise WeightsError(
                f"{where}: {len(hashes)} bytes of chunk hashes; {size} bytes in chunks of {manifest.chunk_bytes} "
                f"have {expected}"
            )


def verify_shapes(manifest: Manifest, expected: Shapes) -> None:
    """Check that a version holds the tensors of the model in service.

    Args:
        expected: ``name -> (dtype, shape)`` of the model in service.

    Raises:
        WeightsError: the text names the first difference.
    """
    found = {t.name: t for t in manifest.tensors}
    which = f"version {manifest.version}"
    if missing := sorted(expected.keys() - found.keys()):
        raise WeightsError(f"{which}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if unknown := sorted(found.keys() - expected.keys()):
        raise WeightsError(f"{which}: tensor {unknown[0]} is not part of the model in service")
    for t in manifest.tensors:
        if (t.dtype, tuple(t.shape)) != expected[t.name]:
            raise WeightsError(
                f"{which}: {t.name} is {t.dtype} {t.shape}, the model in service has {expected[t.name]}"
            )


ADAPTER_DOWN, ADAPTER_UP = ".lora_A.weight", ".lora_B.weight"
"""Endings of the names of a layer's two factors in a version that is an adapter."""
WEIGHT = ".weight"


def adapter_shapes(
    layers: Iterable[str], whole: Shapes, rank: int, dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a version that is an adapter of low rank: A [rank, inputs] and B [outputs, rank] of layers.

    The scale is in B, so a layer computes with W + B A.

    Args:
        layers: paths of layers.
        whole: tensors of the model.
        rank: columns of B.
        dtype: safetensors' name of the float type.

    Raises:
        WeightsError: the model has no matrix of a layer.

    Example:
        >>> adapter_shapes(["q"], {"q.weight": ("F32", (6, 4))}, 2, "F32")
        {'q.lora_A.weight': ('F32', (2, 4)), 'q.lora_B.weight': ('F32', (6, 2))}
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for layer in layers:
        _, shape = whole.get(layer + WEIGHT, ("", ()))
        if len(shape) != 2:
            raise WeightsError(f"an adapter of {layer}, of which the model in service has no matrix")
        found[layer + ADAPTER_DOWN] = (dtype, (rank, shape[1]))
        found[layer + ADAPTER_UP] = (dtype, (shape[0], rank))
    return found


def verify_adapter(manifest: Manifest, whole: Shapes, most: int) -> None:
    """Check that a version is an adapter for layers of the model in service.

    Args:
        whole: tensors of the model.
        most: largest rank that is taken.

    Raises:
        WeightsError: it is none, or not for this model.
    """
    downs = [t for t in manifest.tensors if t.name.endswith(ADAPTER_DOWN) and len(t.shape) == 2]
    if not downs:
        raise WeightsError(
            f"version {manifest.version} has whole weights, but this generator takes adapters; learner and generators "
            "need one run file, with one learner.lora.publish"
        )
    ranks, dtypes = {t.shape[0] for t in downs}, {t.dtype for t in downs}
    if len(ranks) > 1 or len(dtypes) > 1 or not 1 <= max(ranks) <= most:
        raise WeightsError(
            f"version {manifest.version}: adapters of rank {sorted(ranks)} and type {sorted(dtypes)}; one rank of at "
            f"most {most} and one type were expected"
        )
    layers = [t.name.removesuffix(ADAPTER_DOWN) for t in downs]
    verify_shapes(manifest, adapter_shapes(layers, whole, ranks.pop(), dtypes.pop()))


def same_layout(one: Sequence[TensorSpec], other: Sequence[TensorSpec]) -> bool:
    """Return whether two versions list the same names, dtypes and shapes in the same order."""
    return [(t.name, t.dtype, t.shape) for t in one] == [(t.name, t.dtype, t.shape) for t in other]


class _TensorHeader(Struct, frozen=True):
    """Entry of a tensor in the header of a safetensors file."""

    dtype: TensorName
    shape: Annotated[list[Extent], Meta(max_length=16)]


def read_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read ``name -> (dtype, shape)`` from the header of a safetensors file.

    Raises:
        WeightsError: the file is not a safetensors file.
    """
    try:
        with open(path, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if size > MAX_SAFETENSORS_HEADER_BYTES:
                raise WeightsError(f"{path}: header of {size} bytes; this is not a safetensors file")
            entries = msgspec.json.decode(f.read(size), type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        found = {name: msgspec.json.decode(entry, type=_TensorHeader) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{path}: {error}; this is not a safetensors file") from None
    return {name: (entry.dtype, tuple(entry.shape)) for name, entry in found.items()}


def retire(root: Path, keep: int, *, also: int | None = None) -> None:
    """Delete all but the newest ``keep`` versions; readers that hold a file open keep its content.

    Args:
        also: a version that stays, too.
    """
    folders = sorted(p for p in root.glob("v*") if p.name[1:].isdigit())
    for folder in folders[: max(0, len(folders) - keep)]:
        if also is None or int(folder.name[1:]) != also:
            shutil.rmtree(folder, ignore_errors=True)


HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
DERIVED = "rotary_emb.inv_freq"
"""Ending of tensors that follow from config.json; older folders hold them."""
QUANTISED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8")
"""Types of quantised weights, which cannot be trained."""


def replaced_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return ``name -> (safetensors dtype, shape)`` of the tensors that every policy version has to hold.

    An output layer that shares the embeddings' weight is left out, and so is what follows from config.json, because
    neither is trained by itself.

    Raises:
        WeightsError: there are no tensors, or they are quantised. The message says what to do.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= read_shapes(file)
    if not shapes:
        raise WeightsError(f"{folder}: no *.safetensors; save the model with safe_serialization")
    if quantised := sorted(name for name, (dtype, _) in shapes.items() if dtype in QUANTISED):
        raise WeightsError(
            f"{folder}: {quantised[0]} is {shapes[quantised[0]][0]} ({len(quantised)} tensors are quantised); such "
            "weights cannot be trained, so take the model's bfloat16 version"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tied = config.get("tie_word_embeddings", False) and any(name.endswith(EMBEDDINGS) for name in shapes)
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.endswith(DERIVED) and not (tied and name.endswith(HEAD))
    }


def check_names(published: Shapes, folder: Path) -> None:
    """Check that versions with these tensors can replace those of a model folder.

    Args:
        published: ``name -> (dtype, shape)`` of what a learner would publish.

    Raises:
        WeightsError: a name or a shape differs; no generator would take such a version.
    """
    wanted = replaced_shapes(folder)
    missing, unknown = sorted(wanted.keys() - published.keys()), sorted(published.keys() - wanted.keys())
    wrong = sorted(name for name in wanted.keys() & published.keys() if wanted[name][1] != published[name][1])
    for names, what in (
        (missing, "is in the folder, but not in the model that transformers makes of it"),
        (unknown, "is in the model that transformers makes of it, but not in the folder"),
        (wrong, "has another shape in the model that transformers makes of it"),
    ):
        if names:
            raise WeightsError(
                f"{folder}: {names[0]} {what} ({len(names)} in all), so no generator would take a trained version; "
                "load the model with transformers' AutoModelForCausalLM, save it with save_pretrained, and name that "
                "folder"
            )
