"""Files that pytest must not import when it collects doctests."""

# These files run in vLLM's worker process. Importing them needs vLLM and takes seconds.
collect_ignore = ["vllm_worker.py", "generator/vllm_engine/worker.py"]
