"""What the collection of doctests must not import."""

collect_ignore = ["vllm_worker.py"]  # lives in vLLM's worker process; importing it takes vLLM and seconds
