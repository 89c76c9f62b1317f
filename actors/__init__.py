"""Actors run environments; generators sample tokens (`generator/`). An actor never imports the generator.

- `process`: the actor process. `actor`: its event loop's work. `episode`: one episode, and `episodes/` its parts.
  `start`: how one begins that has a note or a prefix. `render`: turns chat messages into token ids.
- `chat_template`: the text of a conversation, and the text that messages add behind an answer.
- `calls/`: who reads the tool calls of a model, and answers with these in a form that environments know.
- `stop_strings`: ends a turn at a stop string. `segments`: cuts a trajectory into segments.
- `route_book`: experts of tokens that are not in a segment yet.
- `uplink/`: leased tasks, and segments on their way to the broker.
- `environments/`: runs the code of environments.
- `failures`: the record of an episode that failed.
- `generator_client/`: asks generators for tokens. `sampled`: what they return.
- `config`, `errors`: settings and errors of both roles.
- `vllm_worker`: import path for vLLM servers run by others.
"""
