"""Names in shared memory that another user of the machine has made first."""

import os
import threading

import pytest

from protocol.errors import NameTaken
from protocol.files import is_own_folder, make_private_folder, open_private_file

STRANGER = 54_321


@pytest.fixture
def as_another_user(monkeypatch):
    """Make what this user has made look like a different user's."""
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def test_a_file_is_made_for_this_user_alone_and_keeps_its_content(tmp_path):
    path = tmp_path / "offbeat-run.owner"
    for expected in (b"", b"run"):
        descriptor = open_private_file(path)
        assert os.read(descriptor, 99) == expected
        os.pwrite(descriptor, b"run", 0)
        os.close(descriptor)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_not_followed(tmp_path, there):
    target, path = tmp_path / "secret", tmp_path / "offbeat-run.owner"
    if there:
        target.write_text("precious")
    path.symlink_to(target)
    with pytest.raises(NameTaken, match=r"offbeat-run.owner is a link of user .*different name"):
        open_private_file(path)
    assert target.exists() == there
    assert not there or target.read_text() == "precious"


def test_a_second_name_of_a_file_is_not_written(tmp_path):
    target, path = tmp_path / "secret", tmp_path / "offbeat-run.owner"
    target.write_text("precious")
    os.link(target, path)
    with pytest.raises(NameTaken):
        open_private_file(path)
    assert target.read_text() == "precious"


def test_a_pipe_does_not_hold_us_up(tmp_path):
    path = tmp_path / "offbeat-run.owner"
    os.mkfifo(path)
    with pytest.raises(NameTaken, match="is a special file"):
        open_private_file(path)


def test_a_file_of_a_different_user_is_refused(tmp_path, as_another_user):
    path = tmp_path / "offbeat-run.owner"
    path.write_text("theirs")
    as_another_user()
    with pytest.raises(NameTaken, match=rf"this process is of user {STRANGER}; have it removed"):
        open_private_file(path)


def test_a_file_that_its_owner_removes_meanwhile_is_made_anew(tmp_path):
    path, stop = tmp_path / "offbeat-run.owner", threading.Event()

    def disturb():
        while not stop.is_set():
            path.unlink(missing_ok=True)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(200):
            os.close(open_private_file(path))
    finally:
        stop.set()
        thread.join(60)


def test_a_folder_is_this_users_or_refused(tmp_path, as_another_user):
    folder = tmp_path / "offbeat-stage"
    make_private_folder(folder)
    make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    as_another_user()
    assert not is_own_folder(folder)
    with pytest.raises(NameTaken, match="offbeat-stage is a folder of user"):
        make_private_folder(folder)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_folder_is_refused(tmp_path, there):
    target, path = tmp_path / "target", tmp_path / "offbeat-stage"
    if there:
        target.mkdir()
    path.symlink_to(target)
    with pytest.raises(NameTaken, match="is a link"):
        make_private_folder(path)
    assert target.exists() == there
