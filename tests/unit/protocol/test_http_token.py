"""The bearer token admits whoever has the keys folder. No sockets."""

import asyncio
import os

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from protocol.errors import KeysUnusable
from protocol.security.http import TOKEN_FILE, TokenCheck, authorization_header, read_tokens, require_token

TOKEN, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def keys(tmp_path):
    (tmp_path / TOKEN_FILE).write_text(TOKEN + "\n")
    (tmp_path / TOKEN_FILE).chmod(0o600)
    return tmp_path


def rewrite(keys, text):
    partial = keys / "partial"
    partial.write_text(text)
    partial.chmod(0o600)
    os.replace(partial, keys / TOKEN_FILE)


def answer(keys, headers):
    async def hello(request):
        return web.Response(text="hello")

    request = make_mocked_request("GET", "/", headers=headers)
    return asyncio.run(require_token(keys)(request, hello))


def test_only_the_token_of_the_folder_opens(keys):
    assert answer(keys, authorization_header(keys)).status == 200
    assert answer(keys, {"Authorization": f"bearer {TOKEN}"}).status == 200
    for said in (
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {OTHER}",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}0",
        "Bearer é",
    ):
        refused = answer(keys, {"Authorization": said})
        assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, 'Bearer realm="offbeat"')
    assert "offbeat keys header" in answer(keys, {}).text


def test_without_keys_everybody_is_let_in():
    assert answer(None, {}).status == 200


def test_a_token_is_replaced_while_servers_run(keys):
    check = TokenCheck(keys)
    rewrite(keys, f"{OTHER}\n{TOKEN}\n")
    assert check.admits(f"Bearer {OTHER}")
    assert check.admits(f"Bearer {TOKEN}")
    assert authorization_header(keys) == {"Authorization": f"Bearer {OTHER}"}
    rewrite(keys, OTHER)
    assert not check.admits(f"Bearer {TOKEN}")


def test_a_file_that_vanishes_or_breaks_opens_to_nobody_new(keys, caplog):
    check = TokenCheck(keys)
    rewrite(keys, "")
    assert not check.admits("Bearer ")
    assert check.admits(f"Bearer {TOKEN}")
    (keys / TOKEN_FILE).unlink()
    assert not check.admits("Bearer ")
    assert "keys make" in caplog.text


@pytest.mark.parametrize("content", ["", "short", "zz" * 32, "ab" * 31, "\n".join([TOKEN] * 9), "é"])
def test_a_file_that_is_no_token_is_refused_with_the_cure(keys, content):
    rewrite(keys, content)
    with pytest.raises(KeysUnusable, match="keys rotate"):
        read_tokens(keys)


def test_a_folder_without_a_token_is_refused_at_once(tmp_path):
    with pytest.raises(KeysUnusable, match="keys make"):
        require_token(tmp_path)


def test_a_token_that_others_can_read_is_refused_with_the_cure(keys):
    (keys / TOKEN_FILE).chmod(0o644)
    with pytest.raises(KeysUnusable, match=r"mode 644 lets .*`chmod 600"):
        read_tokens(keys)


def test_a_refusal_ends_its_connection(keys):
    assert answer(keys, {}).keep_alive is False
    assert answer(keys, authorization_header(keys)).keep_alive is not False
