"""Optimizers: the step of an optimizer of ``torch.optim``, or one's own, as nodes behind the backward."""
