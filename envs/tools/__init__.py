"""Suite `tools`: a class of yours, functions or MCP servers become tools that the model calls.

- `suite`: the suite. `episode`: its episodes. `scoring`: their rewards.
- `toolbox`: the tools of an episode, and how a call of one is run.
- `schema`: the description of a function for the chat template. `calls`: finds calls in an answer.
- `mcp_server`: tools of MCP servers. `loop_thread`: the event loop for coroutines of tools.
"""
