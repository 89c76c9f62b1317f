"""Suite `agent`: an agent of yours that speaks to an OpenAI-compatible endpoint is trained as it is.

- `requests`: the interface by which an environment asks for several answers at a time.
- `suite`: the suite. `episode`: an episode, in which the agent's requests are the turns. `running`: starts its code.
- `command`: an agent that is a program of its own. `guard`: kills it if the actor dies.
- `endpoint`: the HTTP server. `place`: where it listens. `session`: the requests of one agent until they are answered.
- `chat`, `responses`, `messages`: what requests and answers of the three routes look like. `messages_route`: key and
  errors of the third.
- `settings`: what a request says about sampling. `counts`: gauges of the suite.
- `message_tree`: which answer a request follows. `history`: the form in which messages are compared.
"""
