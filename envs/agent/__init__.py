"""Suite `agent`: an agent of yours that speaks to an OpenAI-compatible endpoint is trained as it is.

- `suite`: the suite. `episode`: an episode, in which the agent's requests are the turns.
- `command`: an agent that is a program of its own. `guard`: kills it if the actor dies.
- `endpoint`: the HTTP server. `session`: the requests of one agent, each until it is answered.
- `chat`, `responses`, `messages`: what requests and answers of the three routes look like. `messages_route`: key and
  errors of the third.
- `message_tree`: which answer a request follows. `history`: the form in which messages are compared.
"""
