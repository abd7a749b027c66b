"""What a rank holds, and whether that is as much as it may."""
