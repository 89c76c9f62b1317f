"""Keeps the host ahead of the GPU, so that the next pass is queued while the GPU computes the one before."""

import torch


def pack_no_rows() -> None:
    """Let transformers take the rows of this process for what they are: none is packed from several sequences.

    By default it looks at the positions in every forward pass, and the host then waits for all that the GPU has to do.
    Rows that trajectories share bring a mask of their own, for which it does not look.
    """
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = no_packed_rows


def no_packed_rows(position_ids: torch.Tensor) -> None:
    """Say that each row is one sequence, as `transformers.masking_utils.find_packed_sequence_indices` would."""
