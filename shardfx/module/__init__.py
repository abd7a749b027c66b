"""The parallel module, an ``nn.Module``."""
