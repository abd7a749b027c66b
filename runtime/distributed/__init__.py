"""Real ranks: this process is one rank, on torch.distributed."""
