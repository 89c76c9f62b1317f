"""Suite `tools`: a class of yours, functions or MCP servers become tools that the model calls.

A `toolbox` makes schemas of functions, holds the arguments of a call to them, and runs it; `mcp_server` brings the
tools of servers. An `episode` goes on until the model answers without a call.
"""
