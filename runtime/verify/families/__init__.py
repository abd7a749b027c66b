"""The proof for many ranks: programs that differ in numbers only are written, read and proven as one."""
