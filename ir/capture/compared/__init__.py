"""What is captured, run beside the model."""
