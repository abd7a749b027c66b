"""Proof that the ranks' programs compute what the model computes.

``terms``    the captured program and the planned one as terms: are they the same function of the inputs?
``rules``    from what a rank holds of an op's operands to what it holds of its results, by the op's sharding rule
``moves``    communication and packing, executed on element numbers instead of elements
``interpret``  one rank's program: which box of which term does every node hold?
``static``   all ranks' programs in lock-step, and the proof
``dynamic``  all ranks and the whole program on random numbers in float64

Nothing here imports the passes or the lowering that made the programs.
"""
