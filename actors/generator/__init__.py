"""The generator process: token ids in; token ids, log-probabilities and a policy version per token out.

- `process`: the role; `listening`, `serving`, `requests`: where actors ask, and what becomes of their requests.
- `engine`: what an inference engine must do; `vllm_engine`, `vllm_worker`, `vllm_stats`: vLLM in a child process;
  `http_engine`: a vLLM server run by others. `model_folder`: what is read of a model.
- `weights/`: from an announced version to the engine.
"""
