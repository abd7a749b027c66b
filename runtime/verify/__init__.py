"""Proof that the ranks' programs compute what the model computes.

``terms``    the captured program and the planned one as terms: are they the same function of the inputs?
``rules``    from what a rank holds of an op's operands to what it holds of its results, by the op's sharding rule
``elements`` tensors of element numbers, in the size of their pattern
``moves``    communication and packing, executed on element numbers instead of elements
``interpret``  one rank's program: which box of which term does every node hold?
``lockstep`` ranks side by side, which come together at collectives
``static``   all ranks' programs, and the proof
``scale``    the same for many ranks: every distinct op at every rank, whole programs of two
``naming``   where somebody changed a program
``dynamic``  all ranks and the whole program on random numbers in float64
``shrink``   the same plan with small dims, for ``dynamic``

Nothing here imports the passes or the lowering that made the programs.
"""
