"""How ops are run to be tried: on which values, laid out how, and in a process of its own."""
