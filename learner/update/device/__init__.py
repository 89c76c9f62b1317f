"""What depends on the device that computes.

- `cpu`: what makes torch fast on a CPU.
- `gpu_queue`: what keeps the host ahead of a GPU. `head_kernels`: kernels of the output layer. `fused_layers`: kernels
  of the other layers, from the library Liger.
"""
