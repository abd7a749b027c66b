"""Proof that the ranks' programs compute what the model computes; :mod:`.verdict` is the entry point.

``verdict``          the answer of ``pm.verify()``
``interface``        inputs, constants and outputs of a plan are those of the captured graph
``plan_proof``       the programs of a plan: well formed, run on fake tensors, proven
``loop_proof``       loops: each iteration is a rank of its own
``numeric_check``    all ranks compared with one device on random numbers; counterexamples
``decomposition``    decompositions of ops, compared with the op
``aten_calls``       Python's operators and torch's functions as the ATen calls that they dispatch to
``data_movement``    what programs do besides the model's ops
``fault``            where a program stops computing what the model does

``proof`` has no numbers, and imports neither the passes nor the lowering that made the programs:

``terms``                the captured graph and the planned one as terms: are they the same function of the inputs?
``deduction``            from the shards of an op's operands to those of its results, by the op's rule
``elements``             tensors of element numbers, in the size of their pattern
``numbering``            communication and packing, executed on element numbers instead of elements
``calls``                what is known of a node; which op of the model is a call this rank's version of?
``interpreter``          one rank's program: which box of which term is every node?
``collective_matching``  ranks side by side, matched at collectives and messages

``families`` proves many ranks at the cost of a few:

``varying``          numbers that differ by rank, so that one program is written for many ranks
``family``           ranks whose programs are one, up to such numbers
``equal_shards``     boxes of ranks with equal shards of every value
``single_ops``       every distinct op alone, at every rank
``many_ranks``       the plan's programs, family by family; whole programs, interpreted; the proof
"""
