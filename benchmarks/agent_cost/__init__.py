"""What a request to the endpoint of suite `agent` costs, compared with a bare aiohttp server."""
