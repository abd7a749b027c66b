"""Proof that the ranks' programs compute what the model computes; :mod:`.verdict` is its end, and the way in.

``proof``, without numbers:

``terms``            the captured program and the planned one as terms
``same_function``    are they the same function of the inputs?
``deduction``        from what a rank holds of an op's operands to what it holds of its results, by the op's rule
``elements``         tensors of element numbers, in the size of their pattern (``strided_runs``)
``numbering``        communication and packing, executed on element numbers instead of elements
``known``            what is known of a node of a rank's program
``interpreter``      one rank's program: which box of which term does every node hold?
``calls``            which op of the model is a call this rank's version of?
``meeting``          ranks side by side, which come together at collectives
``every_rank``       all ranks' programs, and the proof

``families``, for many ranks:

``varying``          numbers that ranks have their own of, so that one program is written for many ranks
``alike_ranks``      boxes of ranks that hold as much of every value
``family``           ranks whose programs are one, up to such numbers
``op_code``          the code of an op; a program read as the planned graph in the code of its ops
``single_ops``       every distinct op alone, at every rank
``stage_messages``   messages from stage to stage: each that a rank sends is one that another receives
``own_programs``     the plan's own programs, read family by family
``whole_programs``   whole programs, interpreted
``many_ranks``       the proof

``sample``, on numbers:

``compare``          all ranks and the whole program on random numbers in float64 (``whole``)
``shrink_plan``      the same plan with small dims, for ``compare`` (``sizes``, ``small_graph``)
``ranks_alike``      few ranks that are run for many, which do the same on the same
``counterexample``   numbers that refute what could not be proven

``claims`` holds a plan to the captured inputs, constants and outputs, ``plan_proof`` puts the parts together,
``decomposition`` compares an op's decomposition with the op. ``fault`` says what is wrong in words of the model,
``first_change`` where somebody changed a program. ``proof`` imports neither the passes nor the lowering that made the
programs.
"""
