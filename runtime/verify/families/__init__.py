"""The proof for many ranks: programs that differ only in numbers are lowered, read and proven as one."""
