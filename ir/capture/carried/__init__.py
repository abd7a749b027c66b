"""What a model carries from call to call."""
