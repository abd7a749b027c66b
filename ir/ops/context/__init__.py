"""What attention computes of the keys that a query sees: op by op, of a rank's rows, of a window."""
