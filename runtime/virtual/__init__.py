"""All ranks in this process."""
