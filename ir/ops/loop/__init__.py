"""What is done once for each iteration of a loop axis."""
