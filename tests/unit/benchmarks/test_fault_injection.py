"""A fault campaign breaks things in exactly the way that it reports."""

import random

import numpy as np
import pytest

from actors.generator.weights.staging import Announced, Stage
from broker.errors import JournalError
from broker.journal.files import numbers, read_file
from broker.journal.opening import survey
from broker.journal.records import Kind, file_name
from protocol.errors import WeightsError
from protocol.weights.files import write_version
from protocol.weights.format import read_manifest
from tests.campaigns.faults.edges import half_a_record, somewhere_in_the_middle
from tests.campaigns.faults.kinds import KINDS
from tests.campaigns.faults.network import NEEDS_MEMORY, NEEDS_NETWORK, NEEDS_TMPFS, NEEDS_WIRE
from tests.campaigns.faults.program import schedule
from tests.campaigns.faults.weights import _replace, flipped, mixed, replaced, truncated
from tests.journals import begin, contents

SHAPES = {"a": ("F32", (64, 64))}


def version(root, number):
    array = np.full((64, 64), float(number), "<f4")
    pieces = [("a", memoryview(array.tobytes()))]
    return write_version(root, run="r", epoch=1, version=number, shapes=SHAPES, tensors=pieces)


@pytest.fixture
def stage(tmp_path):
    stage = Stage("r-generator-0", SHAPES, root=tmp_path / "stage")
    yield stage
    stage.close()


def announced(manifest):
    found = read_manifest(manifest)
    return Announced(found.epoch, found.version, str(manifest), (), found.root)


def test_a_version_as_it_was_published_is_taken(tmp_path, stage):
    manifest, data = stage.stage(announced(version(tmp_path, 7)), "r")
    assert manifest.version == 7
    assert data.exists()


@pytest.mark.parametrize("damage", [truncated, flipped, replaced, mixed])
@pytest.mark.parametrize("seed", range(4))
def test_damaged_weights_are_refused(tmp_path, stage, damage, seed):
    older, newer = version(tmp_path, 6), version(tmp_path, 7)
    told = announced(newer)
    _replace(newer.parent, older.parent, damage, random.Random(seed))
    with pytest.raises(WeightsError):
        stage.stage(told, "r")
    assert sorted(path.name for path in tmp_path.glob("v*")) == [older.parent.name, newer.parent.name]
    assert not list(tmp_path.glob("damaged")) + list(tmp_path.glob("removed"))


# --- journal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    with begin(tmp_path / "journal") as journal:
        for number in range(20):
            journal.append(Kind.EVENT, b"event %d" % number)
        journal.flush()
    return tmp_path / "journal"


@pytest.mark.parametrize("seed", range(8))
def test_a_flip_in_the_middle_is_damage_and_no_torn_end(folder, seed):
    path, offset = somewhere_in_the_middle(folder, random.Random(seed))
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert survey(folder).torn is None
    with pytest.raises(JournalError, match=path.name):
        contents(folder)


@pytest.mark.parametrize("seed", range(8))
def test_half_a_record_is_a_torn_end(folder, seed):
    before = contents(folder)
    path = folder / file_name(numbers(folder)[-1])
    with open(path, "ab") as file:
        file.write(half_a_record(read_file(folder, numbers(folder)[-1]), random.Random(seed)))
    here = survey(folder)
    assert here.torn is not None
    assert here.losses == []
    assert contents(folder) == before


# --- schedule ---------------------------------------------------------------------------------------------------


def test_a_schedule_has_each_kind_and_is_the_same_again():
    planned = schedule(list(KINDS), 210, seed=7)
    assert set(planned) == set(KINDS)
    assert len(planned) == 210
    assert planned != sorted(planned)
    assert planned == schedule(list(KINDS), 210, seed=7)


def test_what_a_stage_is_built_for_exists():
    assert set(NEEDS_MEMORY + NEEDS_NETWORK + NEEDS_TMPFS + NEEDS_WIRE) <= set(KINDS)
