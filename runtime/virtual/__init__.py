"""Virtual ranks: all ranks in this process."""
