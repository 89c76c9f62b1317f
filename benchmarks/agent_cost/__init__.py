"""What the endpoint of suite `agent` costs, compared with a bare aiohttp server and with vLLM's own server.

- `program`: both comparisons; `client`: the agent of both, a program of its own.
- `servers`: servers without sampling, whose CPU time per request is compared.
- `tokens`, `serving`: tokens per second of many agents at a time, ours and those of `vllm serve`.
"""
