"""Actors run environments; generators sample tokens (`generator/`). An actor never imports the generator.

- `actor`: the actor process. `episode`: one episode. `render`: turns chat messages into token ids.
- `segments`: cuts a trajectory into segments. `uplink`: segments and task credit on their way to the broker.
- `generator_client`: asks generators for tokens. `sampled`: the tokens that a generator returns.
- `config`, `errors`: settings and errors of both roles.
- `vllm_worker`: import path for vLLM servers run by others.
"""
