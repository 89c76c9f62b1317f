"""Checkpoints of the learner, and where a learner process starts.

- `shards`: weights and optimizer, in one file for each rank. `optimizer_parts`: what of them a rank keeps in DeepSpeed.
- `checkpoint`: the state of one rank beside these files. `checkpoint_files`: the pointer to the newest
  checkpoint, checksums, going back to an earlier one; without torch.
- `models`: models in Hugging Face format that are written during training. `patience`: how long a write may take.
- `lineage`: the epoch, the lineage and the step at which a learner process starts.
"""
