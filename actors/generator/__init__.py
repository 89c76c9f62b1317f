"""The generator process: token ids in; token ids, log-probabilities and a policy version per token out.

`generator` holds it together: `serving` takes the requests of actors to an `engine`, and `weights/` brings announced
versions into it. There are two engines: `http_engine` is a vLLM server run by others, `vllm_engine/` is vLLM in a child
process, a folder because only the files in it may import vLLM.
"""
