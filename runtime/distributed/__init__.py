"""This process as one rank, on torch.distributed."""
