"""Suite `agent`: an agent of yours that speaks to an OpenAI-compatible endpoint is trained as it is.

`endpoint` is the server. Its three routes read and write the forms of `chat`, `responses` and `messages`. A request
waits in its `session` until the `episode` answers it, and `message_tree` says which answer it follows. An agent may
be a function or a program, which `suite` starts; `guard` is a program of its own that kills what the agent's has
started.
"""
