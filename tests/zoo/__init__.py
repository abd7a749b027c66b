"""The models users have, each with inputs, a loss and the hints of somebody who knows Megatron-LM.

    >>> case = make("llama")
    >>> case.loss(case.model(*case.args, **case.kwargs), *case.targets)

Everything is float64, so that a wrong program is told from a rounded one. Two traps are set on purpose:
the ignored tokens (-100) fall unevenly over the batch, so that a mean of per-rank means is visibly wrong, and
the number of key-value heads is half the number of heads.
"""

from . import experts, hugging_face, own_models
from .cases import CASES, IGNORED, Case, labels

__all__ = ["CASES", "IGNORED", "WITH_SEQUENCE", "Case", "experts", "hugging_face", "labels", "make", "own_models"]

WITH_SEQUENCE = ("hf_gpt2", "hf_llama", "hf_qwen3", "hf_bert", "hf_t5", "gpt_fused", "gpt_separate", "llama")
"""The cases with ``sequence_specs`` and without dropout: here, for to make all models takes seconds."""


def make(name: str) -> Case:
    """The case of that name, the same in every process and at every call."""
    return CASES[name]()
