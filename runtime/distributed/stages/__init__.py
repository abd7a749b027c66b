"""What real ranks do where a graph has stages."""
