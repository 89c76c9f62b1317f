"""The generator process: token ids in; token ids, log-probabilities and a policy version per token out.

- `process`: starts and ends it. `generator`: its event loop's work. `model_folder`: the facts that it
  reads from a model folder.
- `pace`: tells a slow engine from one that hangs.
- `listening`: the socket for actors. `guests`: which actors are connected.
- `serving`: the requests of actors. `open_requests`: those under way. `requests`: which are valid, and which may run.
- `engine`: interface of an inference engine. `http_engine/`: a vLLM server run by others.
- `vllm_engine/`: vLLM in a child process. `gpus`: refuses an engine without the GPUs it was given.
- `sleeping`: an engine that gives its GPU to the learner during updates.
- `weights/`: brings an announced version into the engine.
"""
