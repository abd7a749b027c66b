"""shardfx on a machine with a GPU, in at most six minutes: ``make gpu``, or ``python -m benchmarks.gpu``."""
