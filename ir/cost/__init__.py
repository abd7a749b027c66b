"""What programs cost: bytes, flops, memory."""
