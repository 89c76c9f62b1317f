"""Actors run environments; generators sample tokens (`generator/`). An actor never imports the generator.

- `actor`: the process; `episode`: one episode; `render`: chat templates to token ids; `segments`: cuts a trajectory.
- `generator_client`: asks generators for tokens. `uplink`: segments on their way to the broker.
- `config`, `errors`: of both roles. `vllm_worker`: import path for vLLM servers run by others.
"""
