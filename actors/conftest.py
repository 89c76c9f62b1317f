"""What the collection of doctests must not import."""

# These live in vLLM's worker process; importing them takes vLLM and seconds.
collect_ignore = ["vllm_worker.py", "generator/vllm_worker.py"]
