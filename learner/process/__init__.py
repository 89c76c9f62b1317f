"""What every process of the learner role does, whether it trains or evaluates.

- `ranks`: starts the engine; other ranks than 0 follow.
- `joining`: connects to the broker.
- `shared_gpu`: has a GPU alone while generators sleep.
- `stopping`: why the process should end, and its end.
"""
