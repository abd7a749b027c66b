"""Normal forms: calls that give the same, by laws of arithmetic and of moving elements, are one value."""
