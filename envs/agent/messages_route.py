"""Key and errors of the route `/v1/messages`, which have a form of their own."""

import json
from collections.abc import Awaitable, Callable

from aiohttp import web

from envs.agent.messages import message_error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATH = "/s/{session}/v1{again:(/v1)?}/messages"
"""Clients of this API add `/v1` to the base URL. So it may stand twice, and agents may use their base URL as it is."""


def in_messages_form(handle: Handler) -> Handler:
    """Return a handler for requests of Anthropic's API, from one for requests of OpenAI's.

    The key may come as `x-api-key`, and errors have the form that clients of this API read.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        if "Authorization" not in request.headers and "x-api-key" in request.headers:
            headers = {"Authorization": f"Bearer {request.headers['x-api-key']}", **request.headers}
            # Other bytes than those of ASCII cannot be written into a header again.
            request = request.clone(headers={name: v for name, v in headers.items() if v.isascii()})
        try:
            return await handle(request)
        except web.HTTPException as error:
            error.text = json.dumps(message_error(error.status, error.text or error.reason))
            error.content_type = "application/json"
            raise

    return handler
