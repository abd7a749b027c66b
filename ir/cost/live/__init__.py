"""What a program holds in memory, call by call: its storages, and when they live."""
